"""Measures how the speed of training scripts depends on one flag, by default the number of environments.

Every script runs with every value and every variant: a process each, one at a time; the order turns around from seed to
seed. A line of the picture and a row of the table is a script in one mode and variant. Speed is each script's own
measure: environment steps per second of wall clock after warm-up, off-policy from the first update on. Flags after --
are passed to every script.

    python -m leanrl.tools.scaling
    python -m leanrl.tools.scaling --scripts ppo_continuous_action_torchcompile:compile --values 1 4 16 \\
        --total-timesteps 131072 --variants env-backend=gymnasium env-backend=envpool
    python -m leanrl.tools.scaling --flag updates-per-step --values 0.0625 0.25 1 --variants "" "amp=bf16 num-envs=16"
"""

import itertools
import math
import shlex
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated

import numpy as np
import tyro

from leanrl.support.envs import near_names
from leanrl.support.errors import bad
from leanrl.tools.common import (
    COLORS,
    benchmark_record,
    clean,
    failure_note,
    markdown_table,
    new_figure,
    results_folder,
    run_tool,
    write_results,
)
from leanrl.tools.compare import title
from leanrl.tools.trials import (
    RESERVED_FLAGS,
    Contender,
    Trial,
    check_script_args,
    contenders_of,
    exit_code,
    measured,
    require_distinct,
    require_valid,
    run_trials,
    script_module,
    target_device,
)

# The y-axis becomes logarithmic where the fastest run is more than so many times as fast as the slowest.
LINEAR_RANGE = 20


@dataclass
class Args:
    scripts: tuple[str, ...] = (
        "sac_continuous_action_torchcompile:compile",
        "td3_continuous_action_torchcompile:compile",
    )
    """SCRIPT[:MODE] each, as in compare"""
    flag: str = "num-envs"
    """the flag of the scripts on the x-axis, without dashes"""
    values: tuple[str, ...] = ("1", "4", "16", "64")
    """of that flag: numbers above 0"""
    variants: tuple[str, ...] = ("",)
    """further flags, a line with each: NAME=VALUE, without dashes, several of them within quotes; "" for none"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one round with each"""
    total_timesteps: int = 30_000
    """environment steps of a run: must last where they pass fastest, and exceed --learning-starts and any rollout"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results and the run directories; by default RUNS_DIR/scaling/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every script"""


def main(args: Args) -> int:
    require_distinct(args, "scripts", "values", "variants", "seeds")
    flag, values = args.flag.replace("_", "-"), ascending(args.values)
    variants = [[f"--{word}" for word in variant.split()] for variant in args.variants]
    check_script_args(args.script_args, reserved=[f"--{flag}", *map(bare, itertools.chain(*variants))])
    device = target_device(args.script_args)
    script_flags = [f"--total-timesteps={args.total_timesteps}", *args.script_args]
    scripts = contenders_of(args.scripts, "scripts", device, script_flags, script_flags)
    for script in scripts:
        require_flags(script, "flag", [f"--{flag}"])
        for words in variants:
            require_flags(script, "variants", words, reserved=(f"--{flag}",))
    lines = [
        Contender(" ".join([script.label, *words]), (*script.command, *words))
        for script, words in itertools.product(scripts, variants)
    ]
    # The lines of one value are neighbours in time.
    points = {
        (line.label, value): Contender(f"{line.label} --{flag}={value}", (*line.command, f"--{flag}={value}"))
        for value, line in itertools.product(values, lines)
    }
    for point in points.values():
        require_valid(point)
    out = results_folder(args, "scaling")

    trials = run_trials(list(points.values()), args.seeds, out / "runs")

    rows = summarize(trials, points)
    record = {
        **benchmark_record("scaling", device),
        "flag": flag,
        "rows": rows,
        "runs": [asdict(trial) for trial in trials],
    }
    heading = "\n".join(filter(None, (title(record), shlex.join(args.script_args))))
    text = f"{heading}\n\n{render_table(rows, flag)}"
    write_results(out, "scaling", record, text, draw(heading, rows, flag))
    return exit_code(trials)


# -------------------------------------------------------------------------------------------------------------- INPUT


def ascending(values: Sequence[str]) -> list[str]:
    """The values in the order of the x-axis; UsageError unless they are different numbers above 0."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = [math.nan]
    if not all(0 < number < math.inf for number in numbers) or len(set(numbers)) < len(numbers):
        raise bad("values", values, "must be numbers above 0, and none twice")
    return sorted(values, key=float)


def bare(word: str) -> str:
    """The flag that a word sets: ``--num_envs=4`` -> ``--num-envs``, ``--no-compile`` -> ``--compile``."""
    return word.split("=")[0].replace("_", "-").replace("--no-", "--")


def require_flags(script: Contender, name: str, words: Sequence[str], reserved: Sequence[str] = ()) -> None:
    """UsageError unless ``words``, typed for this tool's field ``name``, set flags that the script has.

    Args:
        reserved: flags that they may not set, beside those that the tools set anyway.
    """
    known = [field.name.replace("_", "-") for field in fields(script_module(script).Args)]
    for word in words:
        if bare(word) in (*RESERVED_FLAGS, "--device", *reserved):
            raise bad(name, word[2:], f"{bare(word)} is set by this tool itself or goes after --, see --help")
        if bare(word)[2:] not in known:
            raise bad(name, word[2:], f"{script.label} has no flag {bare(word)}{near_names(bare(word)[2:], known)}")


# ------------------------------------------------------------------------------------------------------------ RESULTS


def summarize(trials: Sequence[Trial], points: dict[tuple[str, str], Contender]) -> list[dict]:
    """One row a line: for each value the speed in every round that did not fail, and why the others did.

    Args:
        points: (line, value) -> what ran there.
    """
    rows = {line: {"line": line, "sps": {}, "median_sps": {}, "failures": []} for line, _ in points}
    for (line, value), point in points.items():
        sps = list(measured(trials, point.label, "sps").values())
        rows[line]["sps"][value] = sps
        rows[line]["median_sps"][value] = statistics.median(sps) if sps else None
        rows[line]["failures"] += [trial.failure for trial in trials if trial.label == point.label and trial.failure]
    return list(rows.values())


def render_table(rows: Sequence[dict], flag: str) -> str:
    """The rows as a markdown table, a column for each value, with its legend."""
    cells = [
        (
            row["line"] + failure_note(row["failures"]),
            *("-" if sps is None else f"{sps:,.0f}" for sps in row["median_sps"].values()),
        )
        for row in rows
    ]
    table = markdown_table((f"sps at --{flag}", *rows[0]["sps"]), cells)
    return f"{table}\n\nsps: environment steps per second after warm-up, medians over rounds."


def draw(heading: str, rows: Sequence[dict], flag: str):
    """The figure: sps against the flag's value, a line through the medians and a dot for each round."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = new_figure(9, 5 + 0.23 * len(rows))
    axes = figure.subplots()
    clean(axes)
    # All colours solid, then all dashed, ...; without the first, which stands for the eager reference elsewhere.
    styles = itertools.product(("-", "--", ":", "-."), COLORS[1:])
    for row, (style, color) in zip(rows, itertools.cycle(styles)):
        medians = [(float(value), sps) for value, sps in row["median_sps"].items() if sps is not None]
        rounds = [(float(value), sps) for value, speeds in row["sps"].items() for sps in speeds]
        label = row["line"] + ("" if medians else " (failed)")
        axes.plot(*np.reshape(medians, (-1, 2)).T, style, color=color, linewidth=1.8, label=label)
        axes.plot(*np.reshape(rounds, (-1, 2)).T, "o", color=color, markersize=5, alpha=0.6, markeredgewidth=0)
    speeds = [sps for row in rows for sps in itertools.chain(*row["sps"].values())]
    values = list(rows[0]["sps"])
    axes.set_xscale("log", base=2)
    axes.set_xticks([float(value) for value in values], values)
    axes.set_xlabel(f"--{flag}")
    axes.xaxis.set_minor_locator(NullLocator())
    logarithmic = max(speeds, default=1.0) > LINEAR_RANGE * min(speeds, default=1.0)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.05 * max(speeds, default=1.0))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.set_title("Environment steps per second" + ", logarithmic" * logarithmic, loc="left")
    # The legend in the order of the lines on the right.
    handles = sorted(axes.get_legend_handles_labels()[0], key=lambda line: -max(line.get_ydata()[-1:], default=0.0))
    figure.legend(handles=handles, loc="outside lower center", frameon=False)
    figure.suptitle("\n".join(textwrap.fill(line, 110) for line in heading.splitlines()), fontsize=11)
    return figure


if __name__ == "__main__":
    run_tool(main, Args)
