"""Runs contenders (a training script in one mode, or a peer) in turn, and reads their results."""

import importlib
import importlib.util
import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import tyro

from leanrl.sebulba.args import SebulbaArgs, validate_start
from leanrl.support.devices import resolve_device
from leanrl.support.envs import near_names
from leanrl.support.errors import UsageError, bad
from leanrl.support.tracking import read_metrics
from leanrl.tools.common import benchmark_record
from leanrl.tools.peers import PEERS, install, plan

SCRIPTS = Path(__file__).parents[1]
REPOSITORY = SCRIPTS.parent
DISTRIBUTED = sorted(path.stem for path in SCRIPTS.glob("cleanba_*.py"))

MODES = ("eager", "compile", "cudagraphs", "compile+cudagraphs", "one-graph", "compile+one-graph")
"""All modes, plainest first, named after what they switch on."""

RESERVED_FLAGS = (
    *("--total-timesteps", "--seed", "--run-name", "--runs-dir", "--resume"),
    *("--compile", "--cudagraphs", "--one-graph"),
)
"""Flags of the scripts that the tools set or do not allow."""

# A child that is asked to stop first finishes its update or compilation. After this time it is killed.
STOP_SECONDS = 20

# How much of the output of a failed run is shown: usually a whole traceback.
LOG_LINES = 60

# How often a running child's memory and deadline are checked.
MEMORY_SECONDS = 0.25


@dataclass
class Deadline:
    """A ``time.monotonic()`` at which something must end; any thread can set it to 0 to end it now."""

    at: float

    @property
    def seconds_left(self) -> float:
        """Below 0 once it has passed."""
        return self.at - time.monotonic()


@dataclass(frozen=True)
class Contender:
    """What is measured: one row of a table."""

    label: str
    command: tuple[str, ...]
    """without --seed, --run-name and --runs-dir"""


@dataclass
class Trial:
    """One run of a contender; what its run directory does not have (yet) is empty."""

    label: str
    seed: int
    command: list[str]
    run_dir: str
    exit_code: int
    summary: dict = field(default_factory=dict)
    args: dict = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    """the log points without losses"""
    peak_memory_mb: float | None = None
    """peak RAM of the run's processes, in 10**6 bytes; None if the system does not say"""

    @property
    def failure(self) -> str | None:
        """Why this trial does not count; None if it does."""
        if self.exit_code:
            return f"exit {self.exit_code}" if self.exit_code > 0 else f"signal {-self.exit_code}"
        if not self.summary:
            return "no summary.json"
        return "interrupted" if self.summary["interrupted"] else None


# ------------------------------------------------------------------------------------------------------------ ENTRIES


def peer_of(label: str) -> str | None:
    """The peer at the start of a contender's label; None for one of our scripts."""
    name = label.partition(" ")[0]
    return name if name in PEERS else None


def flags_of(mode: str) -> list[str]:
    """The flags that one of MODES adds to a script's command line."""
    return [f"--{word}" for word in mode.split("+") if word != "eager"]


def modes_of(script: str) -> list[str]:
    """The MODES that a script has flags for, plainest first; a reference has only ``eager``."""
    known = {f"--{f.name.replace('_', '-')}" for f in fields(importlib.import_module(f"leanrl.{script}").Args)}
    return [mode for mode in MODES if {*flags_of(mode)} <= known]


def parse_entry(entry: str, name: str) -> tuple[str, list[str]]:
    """``SCRIPT[:MODE]`` -> the script, and that mode or all modes of the script.

    Args:
        entry: what was typed.
        name: the tool's field that it was typed for.

    Raises:
        UsageError: there is no such script or mode.
    """
    script, colon, mode = entry.partition(":")
    known = sorted(path.stem for path in SCRIPTS.glob("[!_]*.py"))
    if script not in known:
        raise bad(name, entry, f"no such script{near_names(script, known) or '; choose from ' + ', '.join(known)}")
    modes = modes_of(script)
    if colon and mode not in modes:
        raise bad(name, entry, f"no such mode; choose from {', '.join(modes)}")
    return script, [mode] if colon else modes


def target_device(script_args: Sequence[str]) -> torch.device:
    """The device on which scripts with these flags will run. UsageError if there is no such device."""
    words = " ".join(script_args).replace("=", " ").split()
    name = words[words.index("--device") + 1] if "--device" in words[:-1] else "auto"
    return resolve_device(SimpleNamespace(device=name))


def contenders_of(
    entries: Sequence[str], name: str, device: torch.device, flags: Sequence[str] = ()
) -> list[Contender]:
    """One contender for each entry, or for each of the machine's modes if an entry names none.

    Args:
        entries: ``SCRIPT[:MODE]`` or a peer's name each, and its own flags.
        name: the tool's field that holds them.
        device: where they will run.
        flags: for all; an entry's own come after them.

    Raises:
        UsageError: an entry is bad or repeated, this machine lacks its mode, or its library is not installed.
    """
    contenders = []
    for entry in entries:
        who, *own = entry.split() or [""]
        if who.partition(":")[0] in {peer.partition(":")[0] for peer in PEERS}:
            require_peer(who, name)
            command = (sys.executable, "-m", "leanrl.tools.peers", who, *flags, *own)
            contenders.append(Contender(" ".join([who, *own]), command))
            continue
        script, modes = parse_entry(who, name)
        for mode in modes:
            switches = {flag.removeprefix("--").replace("-", "_"): True for flag in flags_of(mode)}
            try:
                resolve_device(SimpleNamespace(device=str(device), **switches))
            except UsageError as error:
                if modes == [mode]:
                    raise bad(name, entry, str(error)) from None
                if mode == "compile":  # that a machine has no GPU need not be said
                    print(f"leaving out {script}:{mode}: {error}", flush=True)
                continue
            command = (sys.executable, str(SCRIPTS / f"{script}.py"), *flags_of(mode), *flags, *own)
            contenders.append(Contender(" ".join([script, *flags_of(mode), *own]), command))
    labels = [contender.label for contender in contenders]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise bad(name, entries, f"{repeated[0]} is named more than once")
    return contenders


def require_peer(who: str, name: str) -> None:
    """UsageError, about the tool's field ``name``, unless there is such a peer and its library is installed."""
    if who not in PEERS:
        raise bad(name, who, f"no such peer{near_names(who, PEERS)}; choose from {', '.join(PEERS)}")
    if importlib.util.find_spec(PEERS[who].module) is None:
        raise bad(name, who, f"{PEERS[who].module} is not installed; {install(PEERS[who])}")


def check_flags(words: Sequence[str], reserved: Sequence[str] = RESERVED_FLAGS) -> None:
    """UsageError if ``words`` do not begin with a flag, or one is ``reserved`` for the tool."""
    if words and not words[0].startswith("-"):
        raise UsageError(f"{words[0]}: not a flag; only the scripts' flags go here, and --help says where scripts go")
    for word in words:
        # --num_envs=4 sets --num-envs, --no-compile sets --compile.
        if word.split("=")[0].replace("_", "-").replace("--no-", "--") in reserved:
            raise UsageError(f"{word}: this tool sets it or does not allow it; see --help")


def require_distinct(args, *names: str) -> None:
    """UsageError unless every named field of ``args`` has at least one value and no value twice."""
    for name in names:
        values = getattr(args, name)
        if not values or len(set(values)) < len(values):
            raise bad(name, values, "needs at least one value, and none repeated")


# ------------------------------------------------------------------------------------------------------------ RUNNING


def script_and_flags(contender: Contender) -> tuple[ModuleType, tuple[str, ...]]:
    """The training script (as a module) that a contender runs, or whose flags the peer takes; and the flags."""
    peer = peer_of(contender.label)
    script, start = (PEERS[peer].script, 4) if peer else (Path(contender.command[1]).stem, 2)
    return importlib.import_module(f"leanrl.{script}"), contender.command[start:]


def require_valid(contender: Contender, num_groups: int = 1) -> None:
    """UsageError unless the script takes its flags. It is called before the first run, not when it is this one's turn.

    Args:
        num_groups: how many groups of a distributed script will be started.
    """
    module, flags = script_and_flags(contender)
    try:
        # tyro would print a box.
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            args = tyro.cli(module.Args, args=flags)
    except SystemExit:
        script = Path(module.__file__).name
        raise UsageError(f"{script} does not take {shlex.join(flags)}; see its --help") from None
    module.validate(args)
    if isinstance(args, SebulbaArgs):
        _, layout = validate_start(args, num_groups)
        module.validate_shards(args, layout)
    if peer := peer_of(contender.label):
        plan(peer, args)


def rounds_of(contenders: Sequence, seeds: Sequence[int]) -> list[tuple]:
    """A B C, then C B A, ..., each with the seed of its round, so that a machine that slows down favours none."""
    return [(seed, contender) for i, seed in enumerate(seeds) for contender in contenders[:: -1 if i % 2 else 1]]


def run_trials(contenders: Sequence[Contender], seeds: Sequence[int], runs_dir: Path) -> list[Trial]:
    """Runs every contender with every seed, `in_turn` on this terminal; a failed run does not stop the others.

    Raises:
        SystemExit: with code 2 if a run ends with that code: bad input, which it has reported in one line.
        KeyboardInterrupt: Ctrl-C in the first run.
    """

    def run(contender: Contender, seed: int) -> Trial:
        trial = run_trial(contender, seed, runs_dir)
        if trial.failure:
            print(f"{trial.label}, seed {seed}: failed ({trial.failure})", file=sys.stderr, flush=True)
        return trial

    turns = rounds_of(contenders, seeds)
    return in_turn({f"{own.label}, seed {seed}": partial(run, own, seed) for seed, own in turns})


def in_turn(runs: Mapping[str, Callable]) -> list:
    """The results of ``runs``, called one at a time and announced by name. Ctrl-C keeps the results so far.

    Raises:
        KeyboardInterrupt: Ctrl-C in the first one.
    """
    results = []
    try:
        for position, (name, run) in enumerate(runs.items(), start=1):
            print(f"[{position}/{len(runs)}] {name}", flush=True)
            results.append(run())
    except KeyboardInterrupt:
        if not results:
            raise
        print("\ninterrupted: these are the results of the runs so far", file=sys.stderr, flush=True)
    return results


def run_trial(
    contender: Contender, seed: int, runs_dir: Path, deadline: Deadline | None = None, *, exits: bool = True, **rest
) -> Trial:
    """Runs one contender to its end in a run directory of its own, and reads that.

    Args:
        exits: exit with code 2 if the run does: bad input, which it has reported in one line.
        deadline, rest: see ``run_child``.
    """
    name = re.sub(r"[^A-Za-z0-9]+", "_", contender.label).strip("_")[:100]  # file names have at most 255 characters
    # The name has the time, so that a second call may use the same folder.
    run_name = f"{name}__seed{seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    flags = ["--seed", str(seed), "--run-name", run_name, "--runs-dir", str(runs_dir)]
    run_dir = runs_dir / run_name
    trial = Trial(contender.label, seed, [*contender.command, *flags], str(run_dir), exit_code=0)
    trial.exit_code, trial.peak_memory_mb = run_child(trial.command, deadline, **rest)
    if trial.exit_code == 2 and exits:
        raise SystemExit(2)
    trial.summary, trial.args = read_json(run_dir / "summary.json"), read_json(run_dir / "args.json")
    trial.metrics = [
        {key: value for key, value in point.items() if key == "global_step" or key.startswith("charts/")}
        for point in read_metrics(run_dir)
    ]
    return trial


def run_child(
    command: Sequence[str], deadline: Deadline | None = None, output: Path | None = None, **variables: str
) -> tuple[int, float | None]:
    """Runs ``command``; it does not outlive this call.

    Args:
        deadline: when it is asked to stop (a script then checkpoints, and marks its run interrupted); None for never.
        output: file for its output; None for this terminal.
        variables: environment variables, in addition to this process's.

    Returns:
        its exit code, and its peak memory (None if it ended at once or the system does not say).
    """
    # In its own process group, the child gets Ctrl-C only through `stop`: not while it imports, which would print a
    # traceback, and without the compilers that it has started.
    with nullcontext() if output is None else open(output, "wb") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file and subprocess.STDOUT,
            env=child_environ() | variables,
            process_group=0,
        )
    peak = None
    try:
        while True:
            try:
                return child.wait(MEMORY_SECONDS), peak
            except subprocess.TimeoutExpired:
                # The maximum over all checks, as a launcher outlives its ranks.
                peak = max(filter(None, (peak, peak_memory_mb(child.pid))), default=None)
            if deadline is not None and deadline.seconds_left <= 0:
                stop(child)
    finally:
        stop(child)


def child_environ() -> dict[str, str]:
    """The environment of a child that must find this repository's modules."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def run_groups(name: str, command: Sequence[str], num_groups: int) -> None:
    """Runs a distributed script's ``command``, all groups on this machine; several are started as SLURM would.

    Raises:
        SystemExit: the run, reported as ``name``, ended with an exit code other than 0; it exits with the same code.
    """
    environ = child_environ()
    if num_groups > 1:
        # Ports depend on the job number, and GPUs on the group.
        job = {"SLURM_JOB_ID": str(random.randrange(10**6)), "SLURM_STEP_NODELIST": "localhost"}
        environ |= {**job, "SLURM_NTASKS": str(num_groups)}
        command = [*command, "--distributed"]
    gpus = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    share, tasks = len(gpus) // num_groups, []
    with ExitStack() as started:  # all are stopped, whatever interrupts the stop of one
        for number in range(num_groups):
            own = {"SLURM_PROCID": str(number), "CUDA_VISIBLE_DEVICES": ",".join(gpus[number * share :][:share])}
            tasks.append(subprocess.Popen(command, env={**environ, **own}, stdout=subprocess.DEVNULL, process_group=0))
            started.callback(stop, tasks[-1])
        code = abs(next(filter(None, (task.wait() for task in tasks)), 0))
    if code:
        print(f"{name}: ended with exit code {code}", file=sys.stderr)
        raise SystemExit(code)


def peak_memory_mb(pid: int) -> float | None:
    """Peak RAM of a running process so far, in 10**6 bytes; None once it has ended, or if this is not Linux.

    It includes the ranks of a distributed script, which its launcher starts with its own flags. What os.wait4 returns
    at the end would not do: it is at least the memory of this process, which the child had before its exec, and
    includes the compilers that the child has waited for.
    """

    def read(process: int | str, name: str) -> str:
        return Path("/proc", str(process), name).read_text(errors="replace")

    peak = 0.0
    with suppress(OSError, TypeError):  # not every system has these files, and processes may end meanwhile
        flags = read(pid, "cmdline").split("\0")[2:]
        for process in (pid, *read(pid, f"task/{pid}/children").split()):
            if read(process, "cmdline").split("\0")[2:] == flags:
                peak += int(re.search(r"VmHWM:\s+(\d+) kB", read(process, "status"))[1]) * 1024 / 1e6
    return peak or None


def stop(child: subprocess.Popen) -> None:
    """Asks a child to stop, waits for up to STOP_SECONDS or until another signal, then kills it and all it started."""
    child.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    finally:  # also after a second signal
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def end_of(log: Path) -> str:
    """The last lines of a child's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""


def read_json(path: Path) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}


# ------------------------------------------------------------------------------------------------------------ RESULTS


def earlier_record(out: Path, tool: str, device: torch.device) -> dict:
    """The record of an earlier call in ``out``. UsageError: another commit or machine, or uncommitted code."""
    record = read_json(out / f"{tool}.json")
    if not record:
        return {}
    machines = benchmark_record(tool, device)["machine"], record["machine"]
    ours, theirs = ([machine["git_commit"], machine["device_name"]] for machine in machines)
    if ours != theirs:
        raise bad("out", out, f"its {tool}.json is of {theirs[0]} on {theirs[1]}; resume there, or use another folder")
    if ours[0] is None or ours[0].endswith("-dirty"):
        what = f"the scripts may have changed since its {tool}.json: commit them, or name the commit in GIT_COMMIT"
        raise bad("out", out, f"{what}; or take another folder")
    return record


def running_mean(returns: Sequence[float], episodes: Sequence[int], window: int = 100) -> np.ndarray:
    """The mean return of the last ``window`` episodes, or of all if there are fewer, at each of P log points; [P].

    Args:
        returns: [P], the mean return of the episodes since the previous log point; each of them counts with this mean.
        episodes: [P], the number of these episodes.
    """
    ends = np.cumsum(np.asarray(episodes))
    starts = np.maximum(ends - window, 0)
    sums = np.concatenate([[0.0], np.cumsum(np.multiply(returns, episodes))])
    # A window that starts between two log points takes its share of the second one.
    return (sums[1:] - np.interp(starts, np.concatenate([[0], ends]), sums)) / (ends - starts)
