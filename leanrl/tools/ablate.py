"""What each trick of the fast variants is worth: measured on the CPU without and with it, in turn.

Before they are timed, the two sides of a pair must compute the same, but for rounding or where the trick is to compute
something else (in bfloat16, say). Groups of rows: ppo, startup (of PPO), td3, sac, dqn and atari.

    python -m leanrl.tools.ablate
    python -m leanrl.tools.ablate --rows td3 sac --repeats 3
    python -m leanrl.tools.ablate --rows update gae --repeats 5
"""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tqdm import tqdm

from leanrl.support.devices import resolve_device
from leanrl.support.envs import near_names
from leanrl.support.errors import bad, require_at_least
from leanrl.tools import common
from leanrl.tools.ablate_rows import ATARI, DQN, PPO, SAC, STARTUP, TD3
from leanrl.tools.ablation import CPU, Row, measure
from leanrl.tools.trials import require_distinct

# Their rows, and for the title of the table what a thing is that is timed.
GROUPS = {
    "ppo": (PPO, "PPO, HalfCheetah-v5: an update is one minibatch, GAE is one rollout, all else one environment step"),
    "startup": (STARTUP, "PPO, HalfCheetah-v5: from the start of a run until it has compiled"),
    "td3": (TD3, "TD3, HalfCheetah-v5: one environment step with an update, every second one of the actor too"),
    "sac": (SAC, "SAC, HalfCheetah-v5: one environment step with an update, every second one of the actor too"),
    "dqn": (DQN, "DQN, CartPole-v1: transitions are those of ten environment steps, with their update"),
    "atari": (ATARI, "PPO, Breakout-v5: an update is one minibatch, GAE is one rollout, training one environment step"),
}


@dataclass
class Args(common.OutArgs):
    rows: tuple[str, ...] = tuple(GROUPS)
    """what to measure: whole groups, or single rows (any other word lists them)"""
    repeats: int = 11
    """samples of each side; the table has their medians"""


def expand(names: Sequence[str]) -> list[tuple[str, Row]]:
    """The rows that are named, by themselves or by their groups, with the group of each; UsageError for any other."""
    rows = [(group, row) for group, (rows, _) in GROUPS.items() for row in rows]
    known = list(dict.fromkeys([*GROUPS, *(row.name for _, row in rows)]))
    for name in names:
        if name not in known:
            raise bad("rows", name, f"no such row{near_names(name, known) or '; there are ' + ', '.join(known)}")
    return list(dict.fromkeys(pair for name in names for pair in rows if name in (pair[0], pair[1].name)))


def render(lines: Sequence[dict]) -> str:
    """Markdown: a table for each group, of what is paid all the time or once, when a run starts; and facts."""
    parts = []
    for group in dict.fromkeys(line["group"] for line in lines):
        chosen = [line for line in lines if line["group"] == group]
        header = ("trick", "without (µs)", "with (µs)", "gain", "range", "saved per environment step (µs)")
        if chosen[0]["seconds_saved_per_env_step"] is None:
            header = ("trick", "without (s)", "with (s)", "gain", "range")
        # Of groups that earlier versions had, the title is not known.
        parts += [
            f"{GROUPS[group][1]}." if group in GROUPS else group,
            common.markdown_table(header, list(map(cells, chosen))),
        ]
    parts += ["Medians. Gains and savings are taken between samples that followed each other; their range is given."]
    return "\n\n".join(parts)


def cells(line: dict) -> tuple[str, ...]:
    """A line of the table. A trick whose range of gains spans 1 is not known to gain anything."""
    gains = [turn["without"] / turn["with"] for turn in line["seconds_per_sample"]]
    gain = f"{line['gain']:.2f}x", f"{min(gains):.2f} to {max(gains):.2f}"
    both, saved = (line["seconds_without"], line["seconds_with"]), line["seconds_saved_per_env_step"]
    if saved is None:
        return line["trick"], *(f"{seconds:.1f}" for seconds in both), *gain
    return line["trick"], *(f"{1e6 * seconds:,.1f}" for seconds in both), *gain, f"{1e6 * saved:,.1f}"


def main(args: Args) -> int:
    require_at_least(args, 1, "repeats")
    require_distinct(args, "rows")
    rows = expand(args.rows)
    resolve_device(SimpleNamespace(device="cpu", compile=True))
    # As the scripts that need it do, before PyTorch starts the threads that take it over.
    torch.set_flush_denormal(True)
    out = common.results_folder(args, "ablate")

    lines, failures, interrupted = [], {}, False
    with tqdm(rows, unit="row", disable=None) as progress:
        for group, row in progress:
            # Rows compile the same functions anew, more often than one program may.
            torch._dynamo.reset()
            try:
                lines.append({"group": group, "row": row.name, **measure(row, args.repeats, progress.set_postfix_str)})
                progress.write("{trick}: {gain:.2f}x".format(**lines[-1]))
            except Exception as error:
                failures[row.name] = traceback.format_exc()
                progress.write(f"{row.name}: failed ({' '.join(str(error).split())[:300]})", file=sys.stderr)
            except KeyboardInterrupt:
                if not lines:
                    raise
                progress.write("interrupted: the results so far", file=sys.stderr)
                interrupted = True
                break

    record = {**common.benchmark_record("ablate", CPU), "repeats": args.repeats, "rows": lines, "failures": failures}
    text = f"{common.describe_machine(record['machine'])}\n\n{render(lines)}"
    common.write_results(out, "ablate", record, text)
    return 130 if interrupted else 1 if failures else 0


if __name__ == "__main__":
    common.run_tool(main, Args)
