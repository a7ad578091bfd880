"""Compares training scripts in any modes, and the libraries beside them: one table, one picture, one JSON.

A contender is SCRIPT[:MODE], or a peer such as sb3:PPO (Stable-Baselines3) or sbx:SAC, which has the hyperparameters of
our eager reference and takes its flags. Flags of one contender stand with it in quotes, flags of all after --.

Every run is a process of its own, one at a time; the order turns around from seed to seed, and ratios are taken within
a seed. Speed is environment steps per second of wall clock after warm-up, measured by the same code for all. Returns
are compared at the last step that all have reached. With --sweep every contender runs at every value of a flag, and the
picture shows speed against it.

    python -m leanrl.tools.compare
    python -m leanrl.tools.compare --seeds 1 2 3 -- --env-id Hopper-v5
    python -m leanrl.tools.compare --contenders sb3:PPO "sb3:PPO --num-threads 1" ppo_continuous_action_torchcompile \\
        "ppo_continuous_action_torchcompile:compile --amp bf16" --total-timesteps 1000000 --max-seconds None
    python -m leanrl.tools.compare --contenders td3_continuous_action_torchcompile:compile sb3:TD3 \\
        --sweep num-envs 1 4 16 --total-timesteps 6000 -- --learning-starts 1000 --updates-per-step 0.0625
"""

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from leanrl.support.envs import near_names
from leanrl.support.errors import bad
from leanrl.tools.common import (
    COLORS,
    benchmark_record,
    clean,
    describe_machine,
    draw_bars,
    failure_note,
    markdown_table,
    mean_std,
    median,
    new_figure,
    plural,
    results_folder,
    run_tool,
    write_results,
)
from leanrl.tools.peers import PACKAGES, PEERS
from leanrl.tools.trials import (
    RESERVED_FLAGS,
    Contender,
    Trial,
    check_script_args,
    contenders_of,
    exit_code,
    last_episodes,
    peer_of,
    require_distinct,
    require_valid,
    run_trials,
    script_and_flags,
    target_device,
)

# The y-axis of a sweep becomes logarithmic where the fastest run is more than so many times as fast as the slowest.
LINEAR_RANGE = 20


@dataclass
class Args:
    contenders: tuple[str, ...] = ("ppo_continuous_action", "ppo_continuous_action_torchcompile")
    """SCRIPT[:MODE] or PEER each; MODE is eager, compile, cudagraphs, compile+one-graph ..., by default all of this
    machine; PEER is sb3:PPO, sb3:PPO-Atari, sb3:SAC, sb3:TD3, sb3:DQN, the same of sbx (but for Atari), rl_games:PPO"""
    sweep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FLAG VALUES")] = ()
    """a flag without dashes, and the numbers that it takes in turn, as in `num-envs 1 4 16`"""
    seeds: tuple[int, ...] = (1,)
    """every contender runs once with each, a round"""
    total_timesteps: int = 102_400
    """environment steps of a run"""
    max_seconds: float | None = 30.0
    """seconds of training (warm-up not counted) after which a run ends before its last step; None: never"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results and the run directories; by default RUNS_DIR/compare/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every contender"""


def main(args: Args) -> int:
    require_distinct(args, "contenders", "seeds")
    flag, values = swept(args.sweep)
    reserved = ("--max-seconds", f"--{flag}")
    check_script_args(args.script_args, reserved)
    for entry in args.contenders:
        check_script_args(entry.split()[1:], (*reserved, "--device"))
    device = target_device(args.script_args)
    flags = [f"--total-timesteps={args.total_timesteps}", f"--max-seconds={args.max_seconds}", *args.script_args]
    contenders = contenders_of(args.contenders, "contenders", device, flags)
    # Those at one value are neighbours in time.
    points = {value: [at_value(contender, flag, value) for contender in contenders] for value in values}
    for contender in itertools.chain(*points.values()):
        require_valid(contender)
    out = results_folder(args, "compare")

    trials = run_trials([*itertools.chain(*points.values())], args.seeds, out / "runs")
    labels = {value: [contender.label for contender in group] for value, group in points.items()}
    write(out, make_record("compare", trials, labels, device, flag))
    return exit_code(trials)


# -------------------------------------------------------------------------------------------------------------- SWEEPS


def swept(sweep: Sequence[str]) -> tuple[str | None, list[str | None]]:
    """``--sweep``'s flag without dashes, and its values in the order of the x-axis; one None each without it.

    Raises:
        UsageError: a flag that the tool sets itself, or values that are not different numbers above 0.
    """
    if not sweep:
        return None, [None]
    flag, *values = sweep[0].replace("_", "-"), *sweep[1:]
    if f"--{flag}" in (*RESERVED_FLAGS, "--max-seconds", "--device"):
        raise bad("sweep", sweep, f"--{flag} is set by this tool itself, see --help")
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers) or len(set(numbers)) < len(numbers):
        raise bad("sweep", sweep, "must be a flag and numbers above 0, none twice")
    return flag, sorted(values, key=float)


def at_value(contender: Contender, flag: str | None, value: str | None) -> Contender:
    """A contender with the swept flag, under a label that tells it; itself where none is."""
    if flag is None:
        return contender
    known = [field.name.replace("_", "-") for field in fields(script_and_flags(contender)[0].Args)]
    if flag not in known:
        raise bad("sweep", flag, f"{contender.label} has no such flag{near_names(flag, known)}")
    word = f"--{flag}={value}"
    return replace(contender, label=f"{contender.label} {word}", command=(*contender.command, word))


def lines_of(rows: Sequence[dict], flag: str) -> dict[str, dict[str, dict]]:
    """The rows of a sweep by contender, without the flag, and value."""
    lines: dict[str, dict[str, dict]] = {}
    for row in rows:
        lines.setdefault(row["label"].removesuffix(f" --{flag}={row['value']}"), {})[row["value"]] = row
    return lines


# ------------------------------------------------------------------------------------------------------------ RESULTS


def make_record(
    tool: str,
    trials: Sequence[Trial],
    labels: Mapping[str | None, Sequence[str]],
    device: torch.device,
    sweep: str | None = None,
) -> dict:
    """What the JSON holds, of ``labels`` by the value of the flag ``sweep``, or by None without."""
    peers = filter(None, map(peer_of, itertools.chain(*labels.values())))
    packages = {package for peer in peers for package in PACKAGES[PEERS[peer].module]}
    rows = [{"value": value, **row} for value, group in labels.items() for row in summarize(trials, group)]
    record = benchmark_record(tool, device, sorted(packages))
    return {**record, "sweep": sweep, "rows": rows, "runs": [asdict(trial) for trial in trials]}


def write(out: Path, record: dict) -> None:
    """Leaves a record's JSON, table and picture in ``out``, and prints the table."""
    text = f"{title(record)}\n\n{render_table(record['rows'], record['sweep'])}"
    write_results(out, "compare", record, text, draw(record))


def summarize(trials: Sequence[Trial], labels: Sequence[str]) -> list[dict]:
    """One row a contender: what was measured in each of its runs that did not fail, and why the others did.

    Returns are those at ``return_step``, the last step that all these runs have reached. Speeds are divided by that of
    each peer, in the setting with which it is fastest, or by that of the first contender where there is no peer.
    """
    good = {label: [trial for trial in trials if trial.label == label and not trial.failure] for label in labels}

    def measured(label: str, key: str) -> list[float]:
        return [trial.summary[key] for trial in good[label] if trial.summary[key] is not None]

    def ratios(label: str, baseline: str) -> list[float]:
        # Within a seed, because runs of one seed lie close together in time and the machine's speed drifts.
        base = {trial.seed: trial.summary["sps"] for trial in good[baseline]}
        return [trial.summary["sps"] / base[trial.seed] for trial in good[label] if base.get(trial.seed)]

    return_step = min(itertools.chain(*(measured(label, "global_step") for label in labels)), default=0)
    # A peer's fastest setting is the last one here.
    rising = sorted(labels, key=lambda label: statistics.median(measured(label, "sps") or [0.0]))
    baselines = {f"vs {peer}": label for label in [*labels, *rising] if (peer := peer_of(label))}
    baselines = baselines or {"speed-up": labels[0]}
    return [
        {
            "label": label,
            "sps": measured(label, "sps"),
            "ratios": {name: ratios(label, baseline) for name, baseline in baselines.items()},
            "warmup_seconds": measured(label, "warmup_seconds"),
            "return_step": return_step,
            "episodic_return": [mean for t in good[label] if (mean := return_at(t, return_step)) is not None],
            "global_step": measured(label, "global_step"),
            "peak_memory_mb": [trial.peak_memory_mb for trial in good[label] if trial.peak_memory_mb],
            "failures": [trial.failure for trial in trials if trial.label == label and trial.failure],
        }
        for label in labels
    ]


def return_at(trial: Trial, step: int) -> float | None:
    """The mean return of a run's last 100 training episodes, or of all so far, at ``step``; None before the first."""
    return last_episodes(points_until(trial, step))


def points_until(trial: Trial, step: float) -> list[dict]:
    """The log points of a run up to ``step``."""
    return [point for point in trial.metrics if point["global_step"] <= step]


def render_table(rows: Sequence[dict], sweep: str | None = None) -> str:
    """The rows as a markdown table, with its legend; of a ``sweep`` over a flag the speeds, a column for each value."""
    if sweep:
        cells = [
            (
                line + failure_note([*itertools.chain(*(row["failures"] for row in at.values()))]),
                *(median(row["sps"]) for row in at.values()),
            )
            for line, at in lines_of(rows, sweep).items()
        ]
        table = markdown_table((f"sps at --{sweep}", *dict.fromkeys(row["value"] for row in rows)), cells)
        return f"{table}\n\nsps: environment steps per second after warm-up, medians over rounds."
    several = any(len(row["sps"]) > 1 for row in rows)

    def column(key: str, show: Callable = median, **how) -> list[str]:
        return [show(row[key], **how) for row in rows]

    columns = {
        "program": [row["label"] + failure_note(row["failures"]) for row in rows],
        "sps of each round": [" ".join(f"{sps:,.0f}" for sps in row["sps"]) or "-" for row in rows if several],
        "median sps" if several else "sps": column("sps"),
        **{
            name: [median(row["ratios"][name], digits=2) + "x" * bool(row["ratios"][name]) for row in rows]
            for name in rows[0]["ratios"]
        },
        "warm-up s": column("warmup_seconds", digits=1),
        f"return at step {rows[0]['return_step']:,}": column("episodic_return", mean_std),
        "steps": column("global_step"),
        "peak MB": column("peak_memory_mb"),
    }
    columns = {name: column for name, column in columns.items() if {*column} - {"-"}}
    table = markdown_table([*columns], [*zip(*columns.values(), strict=True)])
    legend = (
        "sps: environment steps per second after warm-up; return: mean of the last 100 training episodes at the last "
        "step that all have reached; peak MB: RAM that the run held at most."
    )
    if several:
        legend += "\nReturns: mean ± standard deviation over rounds; all else: medians, of ratios those within a round."
    return f"{table}\n\n{legend}"


def title(record: dict) -> str:
    """What was run, and on what: ``HalfCheetah-v5, seeds 1 2, AMD EPYC ...``; below, the flags of all."""
    env_ids = sorted({run["args"]["args"]["env_id"] for run in record["runs"] if run["args"]})
    seeds = sorted({run["seed"] for run in record["runs"]})
    versions = record["machine"]["versions"]
    peers = [f"{name} {versions[name]}" for name in itertools.chain(*PACKAGES.values()) if name in versions]
    what = ", ".join([*env_ids, plural("seed", seeds), describe_machine(record["machine"]), *peers])
    return "\n".join(filter(None, (what, record["command"].partition(" -- ")[2])))


# ------------------------------------------------------------------------------------------------------------- PICTURE


def learning_curve(trial: Trial, x_key: str, last_step: float = math.inf) -> tuple[list[float], list[float]]:
    """The log points of a run, up to ``last_step``, at which episodes had ended: ``x_key`` and their mean return."""
    points = [row for row in points_until(trial, last_step) if row.get("charts/episodic_return") is not None]
    return [row[x_key] for row in points], [row["charts/episodic_return"] for row in points]


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves over the range that they share, by linear interpolation; empty where they share none."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, end, num=max(len(x) for x, _ in curves) if start <= end else 0)
    return grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)


def draw(record: dict):
    """The figure: of a sweep sps against the flag's value, otherwise bars of sps.

    Where episodes had ended, also their return against steps, as far as all have come, and against wall clock.
    """
    rows, trials = record["rows"], [Trial(**run) for run in record["runs"]]
    if record["sweep"]:
        figure = new_figure(9, 5 + 0.23 * len(lines_of(rows, record["sweep"])))
        draw_sweep(figure, rows, record["sweep"])
    else:
        has_returns = any(row["episodic_return"] for row in rows)
        figure = new_figure(16 if has_returns else 8, max(4.8, 1.6 + 0.75 * len(rows)))
        bars, *curves = figure.subplots(1, 3 if has_returns else 1, squeeze=False)[0]
        draw_speeds(bars, rows)
        if curves:
            steps, clock = curves
            draw_returns(steps, trials, rows, "global_step", "environment steps", rows[0]["return_step"])
            draw_returns(clock, trials, rows, "charts/wall_seconds", "seconds of wall clock, warm-up included")
    width = int(11 * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title(record).splitlines()), fontsize=11)
    return figure


def draw_speeds(axes, rows: Sequence[dict]) -> None:
    """Bars of the median sps, a dot for each round, and the ratios of the table beside them."""
    ratios = [", ".join(f"{statistics.median(r):.1f}x" for r in row["ratios"].values() if r) for row in rows]
    draw_bars(
        axes,
        labels=[row["label"] for row in rows],
        lengths=[statistics.median(row["sps"]) if row["sps"] else None for row in rows],
        points=[row["sps"] for row in rows],
        notes=[median(row["sps"]) + (f"  ({ratio})" if ratio else "") for row, ratio in zip(rows, ratios, strict=True)],
        title=f"Environment steps per second ({', '.join(rows[0]['ratios'])})",
    )


def draw_sweep(figure, rows: Sequence[dict], flag: str) -> None:
    """sps against the flag's value: a line through the medians and a dot for each round, the legend below."""
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    clean(axes)
    # All colours solid, then all dashed, ...; without the first, which stands for the eager reference elsewhere.
    styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), COLORS[1:]))
    for (line, at), (style, color) in zip(lines_of(rows, flag).items(), styles, strict=False):
        medians = [(float(value), statistics.median(row["sps"])) for value, row in at.items() if row["sps"]]
        rounds = [(float(value), sps) for value, row in at.items() for sps in row["sps"]]
        label = line + ("" if medians else " (failed)")
        axes.plot(*np.reshape(medians, (-1, 2)).T, style, color=color, linewidth=1.8, label=label)
        axes.plot(*np.reshape(rounds, (-1, 2)).T, "o", color=color, markersize=5, alpha=0.6, markeredgewidth=0)
    speeds = [sps for row in rows for sps in row["sps"]]
    values = list(dict.fromkeys(row["value"] for row in rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks([float(value) for value in values], values)
    axes.set_xlabel(f"--{flag}")
    logarithmic = max(speeds, default=1.0) > LINEAR_RANGE * min(speeds, default=1.0)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_ylim(0, 1.05 * max(speeds, default=1.0))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.set_title("Environment steps per second" + ", logarithmic" * logarithmic, loc="left")
    # The legend in the order of the lines on the right.
    handles = sorted(axes.get_legend_handles_labels()[0], key=lambda line: -max(line.get_ydata()[-1:], default=0.0))
    figure.legend(handles=handles, loc="outside lower center", frameon=False)


def draw_returns(
    axes, trials: Sequence[Trial], rows: Sequence[dict], x_key: str, x_label: str, last_step: float = math.inf
) -> None:
    """Episodic return against ``x_key``: the mean over seeds in bold, each seed thin, colours as in the bars."""
    for row, color in zip(rows, itertools.cycle(COLORS)):
        curves = [learning_curve(t, x_key, last_step) for t in trials if t.label == row["label"] and not t.failure]
        curves = [curve for curve in curves if curve[0]]
        if len(curves) > 1:
            for curve in curves:
                axes.plot(*curve, color=color, linewidth=0.8, alpha=0.3, marker="." if len(curve[0]) == 1 else "")
        if curves:
            x, y = mean_curve(curves)
            axes.plot(x, y, color=color, linewidth=2, marker="." if len(x) < 10 else "")
    axes.set_title("Episodic return in training, colours as in the bars", loc="left")
    axes.set_xlabel(x_label)
    axes.set_xlim(left=0)
    clean(axes)


if __name__ == "__main__":
    run_tool(main, Args)
