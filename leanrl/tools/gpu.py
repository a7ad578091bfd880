"""Checks the CUDA paths on this machine's GPU, and measures every script there in every mode.

First the tests of what CUDA graphs must do, and that every mode of every script trains as its eager mode does. Then
speeds, one run at a time, what counts most first; they become the table, picture and JSON of `leanrl.tools.compare`, a
folder for each algorithm. What does not fit into --seconds is left out and counted: the same call with the same --out
goes on there.

With --leanrl, LeanRL's own script runs beside ours as it is, with --compile --cudagraphs, in FOLDER/.venv where there
is one. Its speed is the last "... sps" that it prints, the steps per second since its burn-in (PPO on Atari: of its
last ten iterations).

    python -m leanrl.tools.gpu --out runs/h200
    python -m leanrl.tools.gpu --out runs/h200 --algorithms sac td3 --rounds 2 --leanrl ../LeanRL
"""

# What ./run.sh installs for it, beside what everything needs:
# requires: dev

import math
import os
import re
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch.utils._pytree import tree_leaves

from leanrl.sebulba.args import SebulbaArgs
from leanrl.support.checkpoints import list_checkpoints, load_checkpoint
from leanrl.support.devices import available_cores
from leanrl.support.errors import UsageError, bad, require_at_least
from leanrl.support.run import write_json_atomically
from leanrl.tools import common, compare
from leanrl.tools.trials import (
    REPOSITORY,
    Contender,
    Deadline,
    Trial,
    contenders_of,
    end_of,
    read_json,
    require_distinct,
    rounds_of,
    run_child,
    run_trial,
)

Name = Literal["sac", "td3", "ppo", "ppo_atari", "cleanba_ppo", "cleanba_impala", "dqn", "pqn", "pqn_atari"]

# What the checks may take of --seconds.
CHECK_SHARE = 0.4
# A measured run trains for so long after its warm-up; with less time than RUN_SECONDS left, none is begun.
TRAINING_SECONDS, RUN_SECONDS = 10.0, 45.0

TESTS = "tests/test_cudagraphs.py"
# For the checked runs: PyTorch's convolutions otherwise round float32 to 10 bits, each way of computing them otherwise.
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# How far a mode's parameters may be from eager's after the checked updates, in parts of the way that those have gone.
TOLERANCE = 0.05
# What is compared for that, by its name in a checkpoint.
NETWORKS = ("agent", "actor", "critics", "log_alpha", "q_network")

UPSTREAM = "leanrl:"
"""Labels of LeanRL's own scripts begin with it."""


@dataclass
class Args(common.OutArgs):
    algorithms: tuple[Name, ...] = get_args(Name)
    """what is checked and measured"""
    seconds: float = 500.0
    """time limit of the call"""
    rounds: int = 3
    """measurements of each mode"""
    leanrl: str | None = None
    """folder of a checkout of LeanRL, whose scripts are measured too"""


# -------------------------------------------------------------------------------------------------------- ALGORITHMS


@dataclass(frozen=True)
class Algorithm:
    """How the scripts of one algorithm are checked and measured."""

    reference: str | None
    """the eager script; None where that is a mode of the fast one"""
    fast: tuple[str, ...]
    """SCRIPT[:MODE] each, or every mode of a SCRIPT; the first of them is what the others must train as"""
    check_flags: str
    """of a run so short that rounding does not grow into other episodes; it leaves two checkpoints"""
    flags: str = ""
    """of a measured run"""
    upstream_flags: str = ""
    """of LeanRL's own fast script; it is not measured without"""


def off_policy(script: str, check_flags: str, flags: str = "") -> Algorithm:
    """SAC's, TD3's and DQN's."""
    learning = "--learning-starts=1000"
    check_flags = f"{learning} --checkpoint-every=1000 {check_flags}"
    # LeanRL's burn-in of 3 steps would leave the capture of its graphs in the speed.
    upstream_flags = f"{learning} --measure-burnin=500 --total-timesteps=10000"
    return Algorithm(script, (f"{script}_torchcompile",), check_flags, f"{learning} {flags}", upstream_flags)


# Two rollouts, with four updates each. The optimisers' first steps are as long in directions in which the gradient is
# only rounding; with the scripts' own learning rates they can lead to other actions in the second rollout (IMPALA on a
# CPU, compiled beside eager: 6e-2 of the way, and 3e-5 with this one).
GAMES_CHECK = "--learning-rate=1e-5"
ATARI_CHECK = f"{GAMES_CHECK} --update-epochs=1 --checkpoint-every=1024 --total-timesteps=2048"


def cleanba(script: str, num_steps: int, check_flags: str = "") -> Algorithm:
    """A distributed script's, actor threads and learner on one GPU; ``num_steps`` is its default."""
    batch_size = SebulbaArgs.local_num_envs * SebulbaArgs.num_actor_threads * num_steps
    check_flags = f"{GAMES_CHECK} {check_flags} --checkpoint-every={batch_size} --total-timesteps={2 * batch_size}"
    return Algorithm(None, (script, f"{script}:compile+cudagraphs --amp bf16"), check_flags)


PPO, ATARI, PQN_ATARI = (
    f"{name}_torchcompile" for name in ("ppo_continuous_action", "ppo_atari_envpool", "pqn_atari_envpool")
)
ALGORITHMS: dict[Name, Algorithm] = {
    # Forty updates: between a compiled run and an eager one on a CPU rounding has grown to 2e-4 (TD3) and 2e-3 (SAC) of
    # the way by then, and to 3e-2 by the hundredth: each action leads HalfCheetah a little further apart.
    "sac": off_policy("sac_continuous_action", "--total-timesteps=1040"),
    "td3": off_policy("td3_continuous_action", "--total-timesteps=1040"),
    "ppo": Algorithm(
        "ppo_continuous_action",
        (PPO,),
        # Pendulum's motion is smooth: rounding stays rounding. HalfCheetah's would not in so many steps.
        "--env-id=Pendulum-v1 --num-steps=64 --num-minibatches=1 --checkpoint-every=64 --total-timesteps=192",
        upstream_flags="--total-timesteps=20480",
    ),
    "ppo_atari": Algorithm(
        "ppo_atari_envpool",
        (ATARI, f"{ATARI}:compile+one-graph --amp bf16"),
        ATARI_CHECK,
        upstream_flags="--total-timesteps=40960",
    ),
    "cleanba_ppo": cleanba("cleanba_ppo", 128, "--update-epochs=1"),
    "cleanba_impala": cleanba("cleanba_impala", 20),
    # Checked with hardly any greedy actions, as one that is decided by rounding would lead elsewhere; measured on the
    # way to them.
    "dqn": off_policy("dqn", "--total-timesteps=2000 --exploration-fraction=100", "--total-timesteps=60000"),
    # As DQN's. Eight updates.
    "pqn": Algorithm(
        "pqn",
        ("pqn_torchcompile",),
        "--num-steps=64 --num-minibatches=1 --exploration-fraction=100 --checkpoint-every=256 --total-timesteps=512",
        "--total-timesteps=122880",
    ),
    "pqn_atari": Algorithm(
        "pqn_atari_envpool",
        (PQN_ATARI, f"{PQN_ATARI}:compile+cudagraphs --amp bf16"),
        f"{ATARI_CHECK} --exploration-fraction=100",
    ),
}


def checked_contenders(name: Name, device: torch.device) -> list[Contender]:
    """The eager mode of the fast script, then those that must train as it does."""
    return contenders_of(ALGORITHMS[name].fast, "algorithms", device, ALGORITHMS[name].check_flags.split())


def measured_contenders(name: Name, device: torch.device, leanrl: str | None = None) -> list[Contender]:
    """LeanRL's own script, where its folder is given, then our reference and every mode of the fast script.

    Raises:
        UsageError: there is no such script in the folder.
    """
    algorithm = ALGORITHMS[name]
    flags = ["--total-timesteps=1000000", f"--max-seconds={TRAINING_SECONDS}", *algorithm.flags.split()]
    entries = [*filter(None, [algorithm.reference]), *algorithm.fast]
    contenders = contenders_of(entries, "algorithms", device, flags)
    if leanrl is not None and algorithm.upstream_flags:
        folder, script = Path(leanrl), algorithm.fast[0]
        path, python = folder / "leanrl" / f"{script}.py", folder / ".venv" / "bin" / "python"
        if not path.exists():
            raise bad("leanrl", leanrl, f"has no leanrl/{script}.py; name the folder of a checkout of LeanRL")
        own = ["--compile", "--cudagraphs", *algorithm.upstream_flags.split()]
        command = (str(python) if python.exists() else sys.executable, str(path), *own)
        contenders.insert(0, Contender(f"{UPSTREAM}{script} --compile --cudagraphs", command))
    return contenders


def counts_most(contender: Contender) -> bool:
    """Whether a contender comes before others: the plainest of an algorithm, and those with all that makes it fast."""
    plain = "--" not in contender.label and "_torchcompile" not in contender.label
    return plain or any(f"--compile {graphs}" in contender.label for graphs in ("--cudagraphs", "--one-graph"))


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> int:
    require_distinct(args, "algorithms")
    require_at_least(args, 1, "rounds", "seconds")
    if not torch.cuda.is_available():
        raise UsageError("this tool needs a CUDA device, and this machine has none; `compare` measures on a CPU")
    # Several compile at once here, each with workers of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    return examine(args, torch.device("cuda", 0))


def examine(args: Args, device: torch.device) -> int:
    """Checks and measures; the exit code, 1 where a check or a run has failed, in this call or an earlier one."""
    contenders = {name: measured_contenders(name, device, args.leanrl) for name in args.algorithms}
    out = common.results_folder(args, "gpu")
    checks = earlier_checks(out, device)
    end = Deadline.within(args.seconds)

    def write_checks() -> None:
        record = {**common.benchmark_record("gpu", device), "checks": [*checks.values()]}
        write_json_atomically(out / "gpu.json", record)

    write_checks()
    left = 0
    passed = {name for name, row in checks.items() if row["passed"]}
    end_of_checks = Deadline(end.at - (1 - CHECK_SHARE) * args.seconds)
    for row in check(args.algorithms, device, out / "checks", end_of_checks, passed):
        if row is None:
            left += 1
            continue
        print(f"{'passed' if row['passed'] else 'FAILED'}: {row['check']}: {row['detail']}", flush=True)
        checks[row["check"]] = row
        write_checks()

    found = {}
    for name in contenders:
        (out / name).mkdir(exist_ok=True)
        found[name] = [Trial(**run) for run in read_json(out / name / "compare.json").get("runs", ())]
    known = {(trial.label, trial.seed) for trials in found.values() for trial in trials if not trial.failure}
    turns = [turn for turn in turns_of(contenders, args.rounds) if (turn[1].label, turn[2]) not in known]
    for position, (name, contender, seed) in enumerate(turns, start=1):
        trial = None
        if end.seconds_left >= RUN_SECONDS:
            print(f"[{position}/{len(turns)}] {contender.label}, round {seed}", flush=True)
            run = run_upstream if contender.label.startswith(UPSTREAM) else run_trial
            trial = run(contender, seed, out / "runs", end)
        if trial is None or (trial.was_cut_off and end.seconds_left <= 0):
            left += len(turns) - position + 1
            break
        found[name] = [t for t in found[name] if (t.label, t.seed) != (trial.label, seed)] + [trial]
        write_json_atomically(out / name / "compare.json", record_of(found[name], contenders[name], device))

    for name, trials in found.items():
        if trials:
            compare.write(out / name, record_of(trials, contenders[name], device))
    failed = [f"{row['check']}: {row['detail']}" for row in checks.values() if not row["passed"]]
    failed += [f"{t.label}, round {t.seed}: {t.failure}" for trials in found.values() for t in trials if t.failure]
    print(f"\nchecks: {sum(row['passed'] for row in checks.values())} of {len(checks)} passed\nresults: {out}")
    for what in failed:
        print(f"FAILED: {what}")
    if left:
        print(f"no time left for {left} checks and runs; the same call with --out {out} goes on")
    return 1 if failed else 0


def earlier_checks(out: Path, device: torch.device) -> dict[str, dict]:
    """The checks that an earlier call has left in ``out``, by name. UsageError: of another commit or GPU."""
    record = read_json(out / "gpu.json")
    if not record:
        return {}
    ours, theirs = (
        [machine["git_commit"], machine["device_name"]]
        for machine in (common.benchmark_record("gpu", device)["machine"], record["machine"])
    )
    if ours != theirs:
        raise bad("out", out, f"its gpu.json is of {theirs[0]} on {theirs[1]}; go on there, or take another folder")
    if ours[0] is None or ours[0].endswith("-dirty"):
        what = "the scripts may have changed since its gpu.json: commit them, or name the commit in GIT_COMMIT"
        raise bad("out", out, f"{what}; or take another folder")
    return {row["check"]: row for row in record["checks"]}


# ------------------------------------------------------------------------------------------------------------ CHECKS


def check(
    names: Collection[Name], device: torch.device, folder: Path, deadline: Deadline, passed: Collection[str]
) -> Iterator[dict | None]:
    """Runs TESTS, and how far the training of every mode is from eager's; several at once.

    The runs also fill TorchInductor's cache, so that those that are measured find their kernels there.

    Args:
        folder: of the run directories, and of what they print.
        passed: names of checks to leave out.

    Yields:
        {"check": its name, "passed", "detail"} of each; None for one that the deadline left out.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def check_tests() -> dict | None:
        log = folder / "pytest.log"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", str(REPOSITORY / TESTS)]
        code, _ = run_child(command, deadline, log)
        if code and deadline.seconds_left <= 0:
            return None
        if code:
            print(end_of(log), flush=True)
        return {"check": TESTS, "passed": code == 0, "detail": end_of(log).rpartition("\n")[2]}

    def train(contender: Contender) -> Trial | None:
        if deadline.seconds_left <= 0:
            return None
        log = folder / f"{contender.label.replace(' --', '_')}.log"
        trial = run_trial(contender, 1, folder, deadline, log, NO_TF32)
        if trial.failure and deadline.seconds_left <= 0:
            return None
        if trial.failure:
            print(end_of(log), flush=True)
        return trial

    with ThreadPoolExecutor(max(2, available_cores() // 2)) as pool:
        try:
            tests = [] if TESTS in passed else [pool.submit(check_tests)]
            pairs: list[tuple[Future, Future]] = []
            for eager, *others in (checked_contenders(name, device) for name in names):
                others = [contender for contender in others if check_name(contender.label) not in passed]
                reference = pool.submit(train, eager) if others else None
                pairs += [(reference, pool.submit(train, contender)) for contender in others]
            for reference, future in pairs:
                both = reference.result(), future.result()
                yield None if None in both else against_eager(*both)
            for future in tests:
                yield future.result()
        finally:
            deadline.at = 0.0  # after an error the children too are to stop


def check_name(label: str) -> str:
    return f"{label} {'trains' if is_rounded(label) else 'trains as eager'}"


def is_rounded(label: str) -> bool:
    """Whether a mode computes in bfloat16."""
    return label.endswith("bf16")


def against_eager(eager: Trial, trial: Trial) -> dict:
    """One row: how far a mode's parameters are from eager's, in parts of the way between eager's two checkpoints.

    bfloat16 rounds so coarsely that it leads to other actions: there it is enough that the parameters moved and are
    finite.
    """
    row = {"check": check_name(trial.label), "passed": False}
    for run in (eager, trial):
        if run.failure:
            return {**row, "detail": f"{run.label}: {run.failure}"}
    (before, after), (ours_before, ours) = last_parameters(Path(eager.run_dir)), last_parameters(Path(trial.run_dir))
    error = ((ours - after).norm() / (after - before).norm()).item()
    detail = "bit for bit" if torch.equal(ours, after) else f"off by {error:.1e} of the way"
    moved = math.isfinite(error) and not torch.equal(ours, ours_before)
    return {**row, "passed": moved and (is_rounded(trial.label) or error <= TOLERANCE), "detail": detail}


def last_parameters(run_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The networks of the last two checkpoints, the older first, one vector each."""
    vectors = []
    for path in reversed(list_checkpoints(run_dir / "checkpoints")):
        _, state = load_checkpoint(path, {})
        networks = [part for name, part in state["script"].items() if name in NETWORKS]
        vectors.append(torch.cat([leaf.double().flatten() for leaf in tree_leaves(networks)]))
    first, last = vectors
    return first, last


# ------------------------------------------------------------------------------------------------------------ SPEEDS


def turns_of(contenders: dict[Name, list[Contender]], rounds: int) -> list[tuple[Name, Contender, int]]:
    """(algorithm, contender, round) in their order, which turns around with every round, but for what counts most."""
    every = [(name, contender) for name, group in contenders.items() for contender in group]
    turns = [(*turn, seed) for seed, group in rounds_of(every, range(1, rounds + 1)) for turn in group]
    return sorted(turns, key=lambda turn: (turn[2], not counts_most(turn[1])))


def record_of(trials: list[Trial], contenders: list[Contender], device: torch.device) -> dict:
    """compare's of those that have been run; factors are those over LeanRL's own script, or our reference without."""
    labels = dict.fromkeys([contender.label for contender in contenders] + [trial.label for trial in trials])
    ran = [label for label in labels if any(trial.label == label for trial in trials)]
    ran.sort(key=lambda label: not label.startswith(UPSTREAM))
    return compare.make_record("gpu", trials, {None: ran}, device)


def run_upstream(contender: Contender, seed: int, runs_dir: Path, deadline: Deadline) -> Trial:
    """One of LeanRL's own scripts, of which nothing is known but the speed that it prints; without wandb's server."""
    run_dir = runs_dir / f"{re.sub(r'[^A-Za-z0-9]+', '_', contender.label)}__seed{seed}"
    run_dir.mkdir(parents=True, exist_ok=True)
    trial = Trial(contender.label, seed, [*contender.command, f"--seed={seed}"], str(run_dir), exit_code=0)
    log = run_dir / "output.log"
    trial.exit_code, trial.peak_memory_mb = run_child(trial.command, deadline, log, {"WANDB_MODE": "disabled"})
    speeds = re.findall(r"([\d.]+) sps", log.read_text(errors="replace"))
    if speeds:
        unknown = dict.fromkeys(("global_step", "warmup_seconds", "episodic_return"))
        trial.summary = {"sps": float(speeds[-1]), "interrupted": False, **unknown}
    if trial.failure:
        print(end_of(log), flush=True)
    return trial


if __name__ == "__main__":
    common.run_tool(main, Args)
