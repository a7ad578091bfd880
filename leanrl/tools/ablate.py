"""What each trick of the fast variants gains: whole runs on the CPU without and with it, in turn.

The tests show that both sides learn the same. Groups of rows: ppo, startup (of PPO), td3, sac, dqn and atari.

    python -m leanrl.tools.ablate
    python -m leanrl.tools.ablate --rows td3 sac --repeats 3
    python -m leanrl.tools.ablate --rows sums gae --repeats 5
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from leanrl.support.devices import has_bf16_units, resolve_device
from leanrl.support.envs import near_names
from leanrl.support.errors import bad, require_at_least
from leanrl.tools import common
from leanrl.tools.ablate_rows import BF16, ROWS, Row
from leanrl.tools.trials import Contender, end_of, in_turn, require_distinct, rounds_of, run_trial

GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))


@dataclass
class Args(common.OutArgs):
    rows: tuple[str, ...] = GROUPS
    """what to measure: whole groups, or single rows (any other word lists them)"""
    repeats: int = 3
    """pairs of runs; the table shows their medians"""


def expand(names: Sequence[str]) -> list[Row]:
    """The rows named directly or by group; UsageError for an unknown name.

    A group's rows in bf16 are left out on a processor without units for it.
    """
    known = list(dict.fromkeys([*GROUPS, *(row.name for row in ROWS)]))
    for name in names:
        if name not in known:
            raise bad("rows", name, f"no such row{near_names(name, known) or '; choose from ' + ', '.join(known)}")
    bf16_units = has_bf16_units()
    fitting = [row for row in ROWS if bf16_units or BF16 not in row.flags + row.with_flags]
    return [row for row in ROWS if row.name in names or (row.group in names and row in fitting)]


def measure(row: Row, repeats: int) -> dict:
    """Runs both sides in turn (A B, B A, ...). Gains are ratios within a pair, since the machine's speed drifts."""
    sides = [Contender(side, tuple(row.command(side))) for side in ("without", "with")]
    turns = [{} for _ in range(repeats)]
    for seed, side in rounds_of(sides, range(1, repeats + 1)):
        turns[seed - 1][side.label] = seconds_of(row, side, seed)
    saved = statistics.median(turn["without"] - turn["with"] for turn in turns)
    return {
        "group": row.group,
        "row": row.name,
        "trick": row.trick,
        **{f"seconds_{side.label}": statistics.median(turn[side.label] for turn in turns) for side in sides},
        "gain": statistics.median(turn["without"] / turn["with"] for turn in turns),
        "seconds_saved_per_env_step": None if row.is_start else saved,
        "seconds_per_sample": turns,
    }


def seconds_of(row: Row, side: Contender, seed: int) -> float:
    """Seconds of an environment step, or of the warm-up. RuntimeError with the end of its output if the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"} if row.is_start else {}
        trial = run_trial(side, seed, Path(folder), exits=False, output=log, **cache)
        if trial.failure:
            raise RuntimeError(f"{trial.failure}\n{end_of(log)}")
    return trial.summary["warmup_seconds"] if row.is_start else 1 / trial.summary["sps"]


def render(lines: Sequence[dict]) -> str:
    """Markdown: a table for each group, of costs per environment step or once, when a run starts."""
    parts = []
    for group in dict.fromkeys(line["group"] for line in lines):
        chosen = [line for line in lines if line["group"] == group]
        header = ("trick", "without (µs)", "with (µs)", "gain", "range", "saved per environment step (µs)")
        if chosen[0]["seconds_saved_per_env_step"] is None:
            header = ("trick", "without (s)", "with (s)", "gain", "range")
        parts += [f"{group}:", common.markdown_table(header, list(map(cells, chosen)))]
    parts += ["Medians. Gains and savings are between runs that followed each other; the range is of the gains."]
    return "\n\n".join(parts)


def cells(line: dict) -> tuple[str, ...]:
    """A line of the table. If the range of gains spans 1, it is not known whether the trick gains anything."""
    gains = [turn["without"] / turn["with"] for turn in line["seconds_per_sample"]]
    gain = f"{line['gain']:.2f}x", f"{min(gains):.2f} to {max(gains):.2f}"
    both, saved = (line["seconds_without"], line["seconds_with"]), line["seconds_saved_per_env_step"]
    if saved is None:
        return line["trick"], *(f"{seconds:.1f}" for seconds in both), *gain
    *both, saved = (common.rounded([1e6 * seconds], abs(1e6 * seconds))[0] for seconds in (*both, saved))
    return line["trick"], *both, *gain, saved


def main(args: Args) -> int:
    require_at_least(args, 1, "repeats")
    require_distinct(args, "rows")
    rows = expand(args.rows)
    resolve_device(SimpleNamespace(device="cpu", compile=True))
    out = common.results_folder(args, "ablate")
    lines, failures = [], {}

    def run(row: Row) -> None:
        try:
            lines.append(measure(row, args.repeats))
            print(f"{row.trick}: {lines[-1]['gain']:.2f}x", flush=True)
        except RuntimeError as error:
            failures[row.name] = str(error)
            print(f"{row.name}: {row.trick}: failed\n{error}", file=sys.stderr)

    ended = in_turn({f"{row.group}: {row.trick}": partial(run, row) for row in rows})
    record = common.benchmark_record("ablate", torch.device("cpu"))
    record |= {"repeats": args.repeats, "rows": lines, "failures": failures}
    common.write_results(out, "ablate", record, f"{common.describe_machine(record['machine'])}\n\n{render(lines)}")
    return 130 if len(ended) < len(rows) else int(bool(failures))


if __name__ == "__main__":
    common.run_tool(main, Args)
