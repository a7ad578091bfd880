"""Checks the CUDA paths on this machine's GPU, and measures every script there in every mode.

First come the tests that need a GPU, including those that compare modes with eager; with two or more GPUs, also
layouts over NCCL, a kill and a hang. Then speeds are measured, one run at a time, the most important first. They become
the table, picture and JSON file of `leanrl.tools.compare`, with a folder for each algorithm. What does not fit into
--seconds is left out and counted; the same call with the same --out continues from there. A test file that alone takes
more than three fifths of that time needs more --seconds.

With --leanrl, LeanRL's own script runs unchanged beside ours, with --compile --cudagraphs, in FOLDER/.venv if there is
one. Its speed is the last "... sps" that it prints, the steps per second since its burn-in (PPO on Atari: over its last
ten iterations).

    python -m leanrl.tools.gpu --out runs/h200
    python -m leanrl.tools.gpu --out runs/h200 --algorithms sac td3 --rounds 2 --leanrl ../LeanRL
"""

# What ./run.sh installs for this tool, besides the common requirements:
# requires: dev

import re
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from leanrl.support.devices import available_cores
from leanrl.support.errors import UsageError, bad, require_at_least
from leanrl.support.run import write_json_atomically
from leanrl.tools import common, compare, trials
from leanrl.tools.trials import REPOSITORY, Contender, Deadline, Trial

Name = Literal["sac", "td3", "fast_sac", "ppo", "ppo_atari", "cleanba_ppo", "cleanba_impala", "dqn", "pqn", "pqn_atari"]

# The share of --seconds that the checks may take, and the cores for each test file.
CHECK_SHARE, CORES_OF_A_CHECK = 0.6, 4
# A measured run trains for TRAINING_SECONDS after its warm-up; none starts with less than RUN_SECONDS left.
TRAINING_SECONDS, RUN_SECONDS = 10.0, 45.0

UPSTREAM = "leanrl:"
"""The prefix of the labels of LeanRL's own scripts."""


@dataclass
class Args(common.OutArgs):
    algorithms: tuple[Name, ...] = get_args(Name)
    """what is measured"""
    seconds: float = 500.0
    """time limit of the call"""
    rounds: int = 3
    """measurements of each mode"""
    leanrl: str | None = None
    """folder of a checkout of LeanRL, whose scripts are measured too"""


# -------------------------------------------------------------------------------------------------------- ALGORITHMS


class Algorithm(NamedTuple):
    """How the scripts of one algorithm are measured."""

    entries: tuple[str, ...]
    """SCRIPT[:MODE] each, or SCRIPT for all its modes; the others are compared with the first"""
    flags: str = ""
    upstream_flags: str = ""
    """flags of LeanRL's own fast script, which is measured only if there are some"""


LEARNING = "--learning-starts=1000"
# With LeanRL's burn-in of 3 steps, its speed would include the capture of its graphs.
UPSTREAM_LEARNING = f"{LEARNING} --measure-burnin=500 --total-timesteps=10000"


def pair(reference: str, flags: str = "", upstream_flags: str = "", *others: str) -> Algorithm:
    """The eager reference, its fast variant in every mode, and in ``others``, which are modes with flags."""
    fast = f"{reference}_torchcompile"
    return Algorithm((reference, fast, *(f"{fast}:{other}" for other in others)), flags, upstream_flags)


ALGORITHMS: dict[Name, Algorithm] = {
    "sac": pair("sac_continuous_action", LEARNING, UPSTREAM_LEARNING),
    "td3": pair("td3_continuous_action", LEARNING, UPSTREAM_LEARNING),
    "fast_sac": pair("fast_sac", LEARNING),
    "ppo": pair("ppo_continuous_action", "", "--total-timesteps=20480"),
    "ppo_atari": pair("ppo_atari_envpool", "", "--total-timesteps=40960", "compile+one-graph --amp bf16"),
    "cleanba_ppo": Algorithm(("cleanba_ppo", "cleanba_ppo:compile+cudagraphs --amp bf16")),
    "cleanba_impala": Algorithm(("cleanba_impala", "cleanba_impala:compile+cudagraphs --amp bf16")),
    # Measured while the share of greedy actions grows.
    "dqn": pair("dqn", f"{LEARNING} --total-timesteps=60000", UPSTREAM_LEARNING),
    "pqn": pair("pqn", "--total-timesteps=122880"),
    "pqn_atari": pair("pqn_atari_envpool", "", "", "compile+cudagraphs --amp bf16"),
}


def measured_contenders(name: Name, device: torch.device, leanrl: str | None = None) -> list[Contender]:
    """LeanRL's own script, if its folder is given, then our reference and every mode of the fast script.

    Raises:
        UsageError: there is no such script in the folder.
    """
    algorithm = ALGORITHMS[name]
    flags = ["--total-timesteps=1000000", f"--max-seconds={TRAINING_SECONDS}", *algorithm.flags.split()]
    contenders = trials.contenders_of(algorithm.entries, "algorithms", device, flags)
    if leanrl is not None and algorithm.upstream_flags:
        folder, script = Path(leanrl), algorithm.entries[1]
        path, python = folder / "leanrl" / f"{script}.py", folder / ".venv" / "bin" / "python"
        if not path.exists():
            raise bad("leanrl", leanrl, f"has no leanrl/{script}.py; name the folder of a checkout of LeanRL")
        own = ["--compile", "--cudagraphs", *algorithm.upstream_flags.split()]
        command = (str(python) if python.exists() else sys.executable, str(path), *own)
        contenders.insert(0, Contender(f"{UPSTREAM}{script} --compile --cudagraphs", command))
    return contenders


def runs_first(contender: Contender) -> bool:
    """Whether it is the plainest of an algorithm, or has everything that makes it fast."""
    plain = "--" not in contender.label and "_torchcompile" not in contender.label
    return plain or any(f"--compile {graphs}" in contender.label for graphs in ("--cudagraphs", "--one-graph"))


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> int:
    trials.require_distinct(args, "algorithms")
    require_at_least(args, 1, "rounds", "seconds")
    if not torch.cuda.is_available():
        raise UsageError("this tool needs a CUDA device, and this machine has none; `compare` measures on a CPU")
    return examine(args, torch.device("cuda", 0))


def examine(args: Args, device: torch.device) -> int:
    """Checks and measures; returns exit code 1 if a check or a run failed, in this call or an earlier one."""
    contenders = {name: measured_contenders(name, device, args.leanrl) for name in args.algorithms}
    out = common.results_folder(args, "gpu")
    checks = {row["check"]: row for row in trials.earlier_record(out, "gpu", device).get("checks", ())}
    end = Deadline(time.monotonic() + args.seconds)

    def write_checks() -> None:
        record = {**common.benchmark_record("gpu", device), "checks": [*checks.values()]}
        write_json_atomically(out / "gpu.json", record)

    write_checks()
    skipped = 0
    passed = {name for name, row in checks.items() if row["passed"]}
    end_of_checks = Deadline(end.at - (1 - CHECK_SHARE) * args.seconds)
    for row in check(end_of_checks, passed, out / "checks"):
        if row is None:
            skipped += 1
            continue
        print(f"{'passed' if row['passed'] else 'FAILED'}: {row['check']}: {row['detail']}", flush=True)
        checks[row["check"]] = row
        write_checks()

    found = {}
    for name in contenders:
        (out / name).mkdir(exist_ok=True)
        found[name] = [Trial(**run) for run in trials.read_json(out / name / "compare.json").get("runs", ())]
    known = {(trial.label, trial.seed) for measured in found.values() for trial in measured if not trial.failure}
    turns = [turn for turn in turns_of(contenders, args.rounds) if (turn[1].label, turn[2]) not in known]
    for position, (name, contender, seed) in enumerate(turns, start=1):
        trial = None
        if end.seconds_left >= RUN_SECONDS:
            print(f"[{position}/{len(turns)}] {contender.label}, round {seed}", flush=True)
            own = contender, seed, out / "runs", end
            trial = run_upstream(*own) if contender.label.startswith(UPSTREAM) else trials.run_trial(*own, exits=False)
        if trial is None or (trial.failure and end.seconds_left <= 0):
            skipped += len(turns) - position + 1
            break
        found[name] = [t for t in found[name] if (t.label, t.seed) != (trial.label, seed)] + [trial]
        write_json_atomically(out / name / "compare.json", record_of(found[name], contenders[name], device))

    for name, measured in found.items():
        if measured:
            compare.write(out / name, record_of(measured, contenders[name], device))
    failed = [f"{row['check']}: {row['detail']}" for row in checks.values() if not row["passed"]]
    failed += [f"{t.label}, round {t.seed}: {t.failure}" for measured in found.values() for t in measured if t.failure]
    print(f"\nchecks: {sum(row['passed'] for row in checks.values())} of {len(checks)} passed\nresults: {out}")
    for what in failed:
        print(f"FAILED: {what}")
    if skipped:
        print(f"no time left for {skipped} checks and runs; repeat the command with --out {out} to continue")
    return 1 if failed else 0


def check(deadline: Deadline, passed: Collection[str], folder: Path) -> Iterator[dict | None]:
    """Runs the tests that need a GPU, several files at once.

    Args:
        passed: files to leave out.
        folder: for what they print.

    Yields:
        {"check": a file, "passed", "detail"} for each as it ends; None for one that the deadline left out.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def check_file(path: Path) -> dict | None:
        if deadline.seconds_left <= 0:
            return None
        log = folder / f"{path.stem}.log"
        code, _ = trials.run_child([sys.executable, "-m", "pytest", "-q", "-m", "cuda", str(path)], deadline, log)
        if code and deadline.seconds_left <= 0:
            return None
        if code:
            print(trials.end_of(log), flush=True)
        return {"check": path.name, "passed": code == 0, "detail": trials.end_of(log).rpartition("\n")[2]}

    files = [path for path in sorted((REPOSITORY / "tests").glob("test_*.py")) if "mark.cuda" in path.read_text()]
    with ThreadPoolExecutor(max(1, available_cores() // CORES_OF_A_CHECK)) as pool:
        try:
            for future in as_completed([pool.submit(check_file, path) for path in files if path.name not in passed]):
                yield future.result()
        finally:
            deadline.at = 0.0  # after an error the child processes must stop too


def turns_of(contenders: dict[Name, list[Contender]], rounds: int) -> list[tuple[Name, Contender, int]]:
    """(algorithm, contender, round), round by round: the most important first; the order reverses with every round."""
    every = [(name, contender) for name, group in contenders.items() for contender in group]
    turns = [(*turn, seed) for seed, turn in trials.rounds_of(every, range(1, rounds + 1))]
    return sorted(turns, key=lambda turn: (turn[2], not runs_first(turn[1])))


def record_of(results: list[Trial], contenders: list[Contender], device: torch.device) -> dict:
    """compare's record of the runs so far; ratios are over LeanRL's own script, or over our reference without it."""
    ran = {trial.label for trial in results}
    labels = [contender.label for contender in contenders if contender.label in ran]
    return compare.make_record("gpu", results, {None: labels}, device)


def run_upstream(contender: Contender, seed: int, runs_dir: Path, deadline: Deadline) -> Trial:
    """Runs one of LeanRL's own scripts offline; only the speed that it prints is known."""
    run_dir = runs_dir / f"{re.sub(r'[^A-Za-z0-9]+', '_', contender.label)}__seed{seed}"
    run_dir.mkdir(parents=True, exist_ok=True)
    trial = Trial(contender.label, seed, [*contender.command, f"--seed={seed}"], str(run_dir), exit_code=0)
    log = run_dir / "output.log"
    trial.exit_code, trial.peak_memory_mb = trials.run_child(trial.command, deadline, log, WANDB_MODE="disabled")
    if speeds := re.findall(r"([\d.]+) sps", log.read_text(errors="replace")):
        unknown = dict.fromkeys(("global_step", "warmup_seconds", "episodic_return"))
        trial.summary = {"sps": float(speeds[-1]), "interrupted": False, **unknown}
    if trial.failure:
        print(trials.end_of(log), flush=True)
    return trial


if __name__ == "__main__":
    common.run_tool(main, Args)
