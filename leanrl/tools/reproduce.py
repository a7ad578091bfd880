"""Shows that distributed runs learn the same on any layout: compares their last checkpoints, bit for bit.

With --exact-reduction every layout must end with the same parameters and optimiser state. Without it, two runs of one
layout must do so, and layouts must agree within float32 tolerance after one update.

    python -m leanrl.tools.reproduce
    python -m leanrl.tools.reproduce --scripts cleanba_ppo --layouts a0-l0-d1 a0-l1,2-d1 --lags 0 1 2 --updates 50

By default everything runs on this machine's CPU with virtual devices. Layouts of several groups (d2) are started as
SLURM would start them, one task per group. The table is also written to OUT/table.md, and OUT/reproduce.json.
"""

import hashlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.utils._pytree import tree_flatten_with_path

from leanrl.sebulba.layout import parse_layout
from leanrl.support.checkpoints import load_last_checkpoint
from leanrl.support.envs import EnvBackend
from leanrl.support.errors import bad, require_at_least
from leanrl.tools import common
from leanrl.tools.trials import DISTRIBUTED, SCRIPTS, Contender, require_distinct, require_valid, run_groups

LAYOUTS = ("a0-l0-d1", "a0-l0,1-d1", "a0-l1-d1", "a0-l1,2-d1", "a0-l0-d2")
NUM_ACTOR_THREADS = 2
# Flags that the scripts have under the same names.
HANDED_ON = ("device", "env_id", "env_backend", "seed", "num_shards", "num_steps")
# The parameters after one update may differ by this much if sums are taken in another order.
TOLERANCE = 1e-5


@dataclass
class Args(common.OutArgs):
    scripts: tuple[Literal[*DISTRIBUTED], ...] = ("cleanba_ppo", "cleanba_impala")
    """distributed scripts"""
    layouts: tuple[str, ...] = LAYOUTS
    """layouts; the others are compared with the first"""
    lags: tuple[int, ...] = (0, 1)
    """values of --policy-lag; not newest, which is not reproducible"""
    env_id: str = "CartPole-v1"
    """environment"""
    env_backend: EnvBackend = "envpool"
    """what steps the environment"""
    num_envs: int = 32
    """environments in all, the same in every layout"""
    num_shards: int = 4
    """shards, the same in every layout"""
    num_steps: int = 32
    """steps of a rollout"""
    updates: int = 20
    """updates of a run"""
    seed: int = 1
    """seed of every run"""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda needs as many GPUs as a layout has devices"""


class Case(NamedTuple):
    """One run: what sets it apart from the others."""

    script: str
    layout: str
    lag: int
    exact: bool
    updates: int
    repeat: int = 0

    @property
    def name(self) -> str:
        words = (self.script, self.layout.replace(",", ""), f"lag{self.lag}", "exact" if self.exact else "fast")
        return "_".join((*words, f"{self.updates}updates", str(self.repeat)))


def command(case: Case, args: Args, folder: Path) -> list[str]:
    """The command line of a run, for ``run_groups``."""
    actors, learners, num_groups = parse_layout(case.layout)
    num_threads = num_groups * len(actors) * NUM_ACTOR_THREADS
    if args.num_envs % num_threads:
        raise bad("num_envs", args.num_envs, f"{case.layout} has {num_threads} actor threads, which must divide it")
    return [
        sys.executable,
        str(SCRIPTS / f"{case.script}.py"),
        *(f"--{name.replace('_', '-')}={getattr(args, name)}" for name in HANDED_ON),
        f"--total-timesteps={case.updates * args.num_envs * args.num_steps}",
        *("--actor-device-ids", *map(str, actors), "--learner-device-ids", *map(str, learners)),
        f"--num-actor-threads={NUM_ACTOR_THREADS}",
        f"--local-num-envs={args.num_envs // num_threads}",
        "--num-minibatches=2",
        f"--policy-lag={case.lag}",
        "--num-threads=1",
        *(["--exact-reduction"] if case.exact else []),
        *("--runs-dir", str(folder), "--run-name", case.name),
    ]


def run_case(case: Case, args: Args, folder: Path) -> dict[str, torch.Tensor]:
    """Completes one run and returns the tensors of its last checkpoint by name; SystemExit if it fails."""
    *_, num_groups = parse_layout(case.layout)
    run_groups(case.name, command(case, args, folder), num_groups)
    identity = {"script": case.script, "env_id": args.env_id}
    _, state = load_last_checkpoint(folder / case.name / "checkpoints", identity)
    leaves, _ = tree_flatten_with_path(state["script"])
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Twelve hex digits that depend on every bit of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between the parameters of two checkpoints."""
    return max((a[name] - b[name]).abs().max().item() for name in a if "agent" in name)


def compare_script(script: str, lag: int, args: Args, folder: Path) -> list[dict]:
    """Runs every layout of a script with one lag; returns a row for each, which says whether it equals the first."""
    rows = []
    for layout in args.layouts:
        exact = run_case(Case(script, layout, lag, True, args.updates), args, folder)
        one = run_case(Case(script, layout, lag, False, 1), args, folder)
        if layout == args.layouts[0]:
            first_exact, first_one = exact, one
        apart = difference(one, first_one)
        row = {"script": script, "lag": lag, "layout": layout, "fingerprint": fingerprint(exact)}
        row |= {"equal": fingerprint(exact) == fingerprint(first_exact), "difference": apart}
        rows.append({**row, "close": apart <= TOLERANCE})
        print(f"{script}, lag {lag}, {layout}: {row['fingerprint']}", flush=True)
    twice = [run_case(Case(script, layout, lag, False, args.updates, repeat), args, folder) for repeat in (0, 1)]
    rows[-1]["repeatable"] = len({*map(fingerprint, twice)}) == 1
    return rows


def render(rows: Sequence[dict], args: Args) -> str:
    """The table, and what its columns mean."""
    header = ("script", "lag", "exact: fingerprint", "equal", "one update: difference", "close", "repeats")
    cells = []
    for (script, lag), group in itertools.groupby(rows, key=lambda row: (row["script"], row["lag"])):
        layouts = list(group)
        equal, close = (f"{sum(row[key] for row in layouts)} of {len(layouts)}" for key in ("equal", "close"))
        prints = " ".join(dict.fromkeys(row["fingerprint"] for row in layouts))
        apart = f"{max(row['difference'] for row in layouts):.1e}"
        cells.append((script, f"{lag}", prints, equal, apart, close, "yes" if layouts[-1]["repeatable"] else "NO"))
    legend = (
        f"{args.env_id}, {args.num_envs} environments, {args.num_shards} shards, {args.updates} updates. Equal: layouts"
        " whose last checkpoint is the first's, bit for bit, with --exact-reduction. Difference: the largest between "
        f"parameters after one update without it; close: within {TOLERANCE:g}. Repeats: two runs of the last layout "
        "without it are equal."
    )
    return f"{common.markdown_table(header, cells)}\n\n{legend}"


def main(args: Args) -> int:
    """Returns 0 if every layout computes the same, else 1."""
    require_distinct(args, "scripts", "layouts", "lags")
    require_at_least(args, 1, "num_envs", "num_shards", "num_steps", "updates")
    if min(args.lags) < 0:
        raise bad("lags", args.lags, "must be at least 0")
    for script, layout in itertools.product(args.scripts, args.layouts):
        case = Case(script, layout, min(args.lags), True, 1)
        *_, num_groups = parse_layout(layout)
        require_valid(Contender(case.name, tuple(command(case, args, Path()))), num_groups)
    out = common.results_folder(args, "reproduce")
    rows = []
    for script, lag in itertools.product(args.scripts, args.lags):
        rows += compare_script(script, lag, args, out / "runs" / time.strftime("%Y%m%d-%H%M%S"))
    record = {**common.benchmark_record("reproduce", torch.device(args.device)), "args": asdict(args), "rows": rows}
    text = f"{common.describe_machine(record['machine'])}\n\n{render(rows, args)}"
    common.write_results(out, "reproduce", record, text)
    return 0 if all(row["equal"] and row["close"] and row.get("repeatable", True) for row in rows) else 1


if __name__ == "__main__":
    common.run_tool(main, Args)
