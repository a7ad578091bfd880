"""What each trick of the fast variants is worth: measured on the CPU without and with it, in turn.

Before they are timed, the two sides of a pair must compute the same, but for rounding or where the trick is to compute
something else (in bfloat16, say). Groups of rows: ppo, startup (of PPO), td3, replay, sac, dqn, atari, and eager:
common advice for eager code.

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
from leanrl.support.run import write_json_atomically
from leanrl.tools.ablate_dqn import DQN
from leanrl.tools.ablate_eager import EAGER
from leanrl.tools.ablate_ppo import PPO, STARTUP
from leanrl.tools.ablate_ppo_atari import ATARI
from leanrl.tools.ablate_sac import SAC
from leanrl.tools.ablate_td3 import REPLAY, TD3
from leanrl.tools.ablation import CPU, measure
from leanrl.tools.common import benchmark_record, describe_machine, markdown_table, results_folder, run_tool
from leanrl.tools.trials import require_distinct

GROUPS = {
    "ppo": PPO,
    "startup": STARTUP,
    "td3": TD3,
    "replay": REPLAY,
    "sac": SAC,
    "dqn": DQN,
    "atari": ATARI,
    "eager": EAGER,
}


@dataclass
class Args:
    rows: tuple[str, ...] = tuple(GROUPS)
    """what to measure: whole groups, or single rows (any other word lists them)"""
    repeats: int = 11
    """samples of each side; the table has their medians"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results; by default RUNS_DIR/ablate/TIME"""


def expand(names: Sequence[str]) -> dict[str, str]:
    """The rows that are named, by themselves or by their groups, with the group of each; UsageError for any other."""
    groups = {row: group for group in GROUPS for row in GROUPS[group].rows}
    known = list(dict.fromkeys([*GROUPS, *groups]))
    found = {}
    for name in names:
        if name not in known:
            raise bad("rows", name, f"no such row{near_names(name, known) or '; there are ' + ', '.join(known)}")
        found |= {row: groups[row] for row in (GROUPS[name].rows if name in GROUPS else [name])}
    return found


def render(lines: Sequence[dict]) -> str:
    """Markdown: for each group a table of what is paid all the time, one of what is paid once, and facts."""
    groups = {line["group"]: GROUPS[line["group"]] for line in lines}
    parts = []
    for name, group in groups.items():
        running, once, facts = [], [], []
        for line in (line for line in lines if line["group"] == name):
            saved, gain = line["seconds_saved_per_env_step"], (f"{line['gain']:.2f}x", range_of_gains(line))
            both = line["seconds_without"], line["seconds_with"]
            if saved is None:
                once.append((line["trick"], *(f"{seconds:.1f}" for seconds in both), *gain))
            else:
                running.append((line["trick"], *(f"{1e6 * s:,.1f}" for s in both), *gain, f"{1e6 * saved:,.1f}"))
            facts += [line["facts"]] if line["facts"] else []
        tables = [
            (("trick", "without (µs)", "with (µs)", "gain", "range", "saved per environment step (µs)"), running),
            (("trick", "without (s)", "with (s)", "gain", "range"), once),
        ]
        parts += [f"{group.title}:", *(markdown_table(header, cells) for header, cells in tables if cells)]
        parts += [text for text in (group.legend, *facts) if text]
    parts.append(
        "Medians. Gains and savings are taken between samples that followed each other, and range over what is given."
    )
    return "\n\n".join(parts)


def range_of_gains(line: dict) -> str:
    """The least and the largest gain of a turn: a trick whose range spans 1 is not known to gain anything."""
    gains = [turn["without"] / turn["with"] for turn in line["seconds_per_sample"]]
    return f"{min(gains):.2f} to {max(gains):.2f}"


def main(args: Args) -> int:
    require_at_least(args, 1, "repeats")
    require_distinct(args, "rows")
    rows = expand(args.rows)
    resolve_device(SimpleNamespace(device="cpu", compile=True))
    # As the scripts that need it do, before PyTorch starts the threads that take it over.
    torch.set_flush_denormal(True)
    out = results_folder(args, "ablate")

    lines, failures, interrupted = [], {}, False
    with tqdm(rows.items(), unit="row", disable=None) as progress:
        for name, group in progress:
            # Rows compile the same functions anew, more often than one program may.
            torch._dynamo.reset()
            try:
                for line in GROUPS[group].rows[name]():
                    measured = measure(line, args.repeats, progress.set_postfix_str)
                    lines.append({"group": group, "row": name, **measured})
                    progress.write("{trick}: {gain:.2f}x".format(**lines[-1]))
            except Exception as error:
                failures[name] = traceback.format_exc()
                progress.write(f"{name}: failed ({' '.join(str(error).split())[:300]})", file=sys.stderr)
            except KeyboardInterrupt:
                if not lines:
                    raise
                interrupted = True
                break
    if interrupted:
        print("interrupted: the results so far", file=sys.stderr)

    record = {**benchmark_record("ablate", CPU), "repeats": args.repeats, "rows": lines, "failures": failures}
    text = f"{describe_machine(record['machine'])}\n\n{render(lines)}"
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomically(out / "ablate.json", record)
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\nJSON:  {out / 'ablate.json'}\ntable: {out / 'table.md'}")
    return 130 if interrupted else 1 if failures else 0


if __name__ == "__main__":
    run_tool(main, Args)
