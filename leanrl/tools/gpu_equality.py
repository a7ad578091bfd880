"""Whether graphs do what they must on a GPU, and every mode of every script trains as its eager mode does there."""

import math
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from leanrl.support.checkpoints import list_checkpoints, load_checkpoint
from leanrl.support.devices import available_cores
from leanrl.tools.gpu_plans import Plan, contenders_with_bf16, is_fastest
from leanrl.tools.trials import Contender, Deadline, Trial, end_of, read_json, run_child, run_trial

# For the checked runs: PyTorch's convolutions otherwise round float32 to 10 bits, each way of computing them otherwise.
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# How far a mode's parameters may be from eager's after the checked updates, in parts of the way that those have gone.
TOLERANCE = 0.05
# What is compared for that, by its name in a checkpoint.
NETWORKS = ("agent", "actor", "critics", "log_alpha", "q_network")


def check(
    plans: Sequence[Plan],
    device: torch.device,
    runs_dir: Path,
    deadline: Deadline,
    known: Collection[str],
    report: Callable[[dict], None],
) -> None:
    """What ``gpu_checks`` finds, and for every mode how far its training is from eager's; several runs at once.

    The runs also fill TorchInductor's cache, so that those that are measured find their kernels there.

    Args:
        known: names of checks that have passed. They are left out, those of graphs only where all have.
        report: called with each row {"check", "passed", "detail"}; of a failed one, "output" is the end of its log.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    plainest: dict[Contender, Contender] = {}
    """by contender that is checked"""
    for plan in plans:
        eager, *others = checked_contenders(plan, device)
        plainest |= {other: eager for other in others if check_name(other.label) not in known}
    # What others are compared with, then what counts most.
    order = sorted(dict.fromkeys((*plainest.values(), *plainest)), key=lambda c: (c in plainest, not is_fastest(c)))
    with ThreadPoolExecutor(max(2, available_cores() // 2)) as pool:
        try:
            of_graphs = None if graph_checks() <= set(known) else pool.submit(check_graphs, runs_dir, deadline)
            runs = {
                contender: pool.submit(
                    run_trial, contender, 1, runs_dir / "checks", deadline, log_of(contender, runs_dir), NO_TF32
                )
                for contender in order
            }
            for row in of_graphs.result() if of_graphs else ():
                report(row)
            for contender, eager in plainest.items():
                trial, reference = runs[contender].result(), runs[eager].result()
                if deadline.seconds_left <= 0 and (trial.was_cut_off or reference.was_cut_off):
                    print(f"no time left for the check of {contender.label}", flush=True)
                    continue
                row = against_eager(reference, trial)
                report(row if row["passed"] else row | {"output": end_of(log_of(contender, runs_dir))})
        except BaseException:
            deadline.at = 0.0  # the children too are to stop
            raise


def check_graphs(runs_dir: Path, deadline: Deadline) -> list[dict]:
    """The rows of ``gpu_checks``, and one more that says so where it fails as a whole."""
    found, log = runs_dir / "gpu_checks.json", runs_dir / "gpu_checks.log"
    exit_code, _ = run_child([sys.executable, "-m", "leanrl.tools.gpu_checks", str(found)], deadline, log)
    rows = read_json(found) or []
    if exit_code and deadline.seconds_left <= 0:
        print("no time left for all of gpu_checks", flush=True)
    elif exit_code or not all(row["passed"] for row in rows):
        detail = f"exit {exit_code}, {len(rows)} of {len(graph_checks())} checks reported"
        rows.append({"check": "gpu_checks finds nothing", "passed": False, "detail": detail, "output": end_of(log)})
    return rows


def graph_checks() -> set[str]:
    """The names of those that ``gpu_checks`` makes."""
    from leanrl.tools.gpu_checks import CHECKS  # with the actor-learner scripts, which no other part of this needs

    return {fn.__doc__ for fn in CHECKS}


def training_checks(plan: Plan, device: torch.device) -> set[str]:
    """The names of those that compare a plan's modes with eager."""
    return {check_name(contender.label) for contender in checked_contenders(plan, device)[1:]}


def checked_contenders(plan: Plan, device: torch.device) -> list[Contender]:
    """The plain mode of the fast variant, then those that must train as it does."""
    return contenders_with_bf16(plan, plan.modes, device, plan.check_flags)


def check_name(label: str) -> str:
    return f"{label} {'trains' if is_rounded(label) else 'trains as eager'}"


def is_rounded(label: str) -> bool:
    """Whether a mode computes in bfloat16."""
    return label.endswith("bf16")


def log_of(contender: Contender, runs_dir: Path) -> Path:
    """Where a checked run prints to."""
    return runs_dir / f"{contender.label.replace(' --', '_')}.log"


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
    """The networks of the last two checkpoints, one vector each."""
    vectors = []
    for path in reversed(list_checkpoints(run_dir / "checkpoints")):
        _, state = load_checkpoint(path, {})
        networks = [part for name, part in state["script"].items() if name in NETWORKS]
        vectors.append(torch.cat([leaf.double().flatten() for leaf in tree_leaves(networks)]))
    first, last = vectors
    return first, last
