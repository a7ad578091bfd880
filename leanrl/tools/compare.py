"""Compares training scripts, in any modes and over any seeds: one table, one picture, one JSON.

Every run is a process of its own, one at a time; the order turns around from seed to seed. Speed is each script's own
measure: environment steps per second of wall clock after warm-up. Returns are compared at the last step that all have
reached. Flags after -- are passed to every script.

    python -m leanrl.tools.compare
    python -m leanrl.tools.compare --seeds 1 2 3 -- --env-id Hopper-v5
    python -m leanrl.tools.compare --scripts ppo_continuous_action_torchcompile:eager \\
        ppo_continuous_action_torchcompile:compile+cudagraphs --total-timesteps 1000000 --max-seconds None
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np
import tyro

from leanrl.tools.common import (
    COLORS,
    benchmark_record,
    clean,
    describe_machine,
    draw_bars,
    failure_note,
    markdown_table,
    mean_std,
    new_figure,
    plural,
    results_folder,
    run_tool,
    write_results,
)
from leanrl.tools.trials import (
    Trial,
    check_script_args,
    contenders_of,
    exit_code,
    last_episodes,
    measured,
    peak_memories,
    require_distinct,
    require_valid,
    run_trials,
    sps_ratios,
    target_device,
)


@dataclass
class Args:
    scripts: tuple[str, ...] = ("ppo_continuous_action", "ppo_continuous_action_torchcompile")
    """SCRIPT[:MODE] each; MODE is eager, compile, cudagraphs, compile+one-graph ...; by default all of this machine"""
    seeds: tuple[int, ...] = (1,)
    """every script runs once with each"""
    total_timesteps: int = 102_400
    """environment steps of a run"""
    max_seconds: float | None = 30.0
    """seconds of training (warm-up not counted) after which a run ends before its last step; None: never"""
    amp: tuple[Literal["none", "bf16"], ...] = ("none",)
    """--amp of the compiled scripts, a row with each, as in `none bf16`; the others stay float32"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results and the run directories; by default RUNS_DIR/compare/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every script"""


def main(args: Args) -> int:
    require_distinct(args, "scripts", "seeds", "amp")
    check_script_args(args.script_args, reserved=("--max-seconds", *(() if args.amp == ("none",) else ("--amp",))))
    device = target_device(args.script_args)
    flags = [f"--total-timesteps={args.total_timesteps}", f"--max-seconds={args.max_seconds}", *args.script_args]
    contenders = contenders_of(args.scripts, "scripts", device, fast_flags=flags, reference_flags=flags, amp=args.amp)
    for contender in contenders:
        require_valid(contender)
    out = results_folder(args, "compare")

    trials = run_trials(contenders, args.seeds, out / "runs")

    rows = summarize(trials, [contender.label for contender in contenders])
    record = {**benchmark_record("compare", device), "rows": rows, "runs": [asdict(trial) for trial in trials]}
    text = f"{title(record)}\n\n{render_table(rows)}"
    write_results(out, "compare", record, text, draw(record, trials))
    return exit_code(trials)


def summarize(trials: Sequence[Trial], labels: Sequence[str]) -> list[dict]:
    """One row a contender: what was measured in each of its runs that did not fail, and why the others did.

    Returns are those at ``return_step``, the last step that all these runs have reached.
    """
    steps = {label: list(measured(trials, label, "global_step").values()) for label in labels}
    return_step = min(itertools.chain(*steps.values()), default=0)
    return [
        {
            "mode": label,
            **{key: list(measured(trials, label, key).values()) for key in ("sps", "warmup_seconds")},
            "return_step": return_step,
            "episodic_return": returns_at(trials, label, return_step),
            "global_step": steps[label],
            "speedup": sps_ratios(trials, label, baseline=labels[0]),
            "peak_memory_mb": peak_memories(trials, label),
            "failures": [trial.failure for trial in trials if trial.label == label and trial.failure],
        }
        for label in labels
    ]


def returns_at(trials: Sequence[Trial], label: str, step: int) -> list[float]:
    """The mean return of the last 100 training episodes, or of all so far, at ``step``: of each run that has one."""
    runs = (trial for trial in trials if trial.label == label and not trial.failure)
    means = (last_episodes(points_until(trial, step), or_fewer=True) for trial in runs)
    return [mean for mean in means if mean is not None]


def points_until(trial: Trial, step: float) -> list[dict]:
    """The log points of a run up to ``step``."""
    return [point for point in trial.metrics if point["global_step"] <= step]


def render_table(rows: Sequence[dict]) -> str:
    """The rows as a markdown table in the manner of LeanRL's README, with its legend."""
    cells = [
        (
            row["mode"] + failure_note(row["failures"]),
            mean_std(row["sps"]),
            mean_std(row["warmup_seconds"], digits=1),
            mean_std(row["speedup"], digits=2) + ("x" if row["speedup"] else ""),
            mean_std(row["episodic_return"]),
            mean_std(row["global_step"]),
            mean_std(row["peak_memory_mb"]),
        )
        for row in rows
    ]
    returns = f"return at step {rows[0]['return_step']:,}"
    table = markdown_table(("mode", "sps", "warm-up s", "speed-up", returns, "steps", "peak MB"), cells)
    legend = (
        "sps: environment steps per second after warm-up; return: mean of the last 100 training episodes at the last "
        "step that all have reached; peak MB: RAM that the run held at most."
    )
    if any(len(row["sps"]) > 1 for row in rows):
        legend += " Mean ± standard deviation over seeds."
    return f"{table}\n\n{legend}"


def title(record: dict) -> str:
    """What was run, and on what: ``HalfCheetah-v5, seeds 1 2, AMD EPYC ...``."""
    env_ids = sorted({run["args"]["args"]["env_id"] for run in record["runs"] if run["args"]})
    seeds = sorted({run["seed"] for run in record["runs"]})
    return ", ".join([*env_ids, plural("seed", seeds), describe_machine(record["machine"])])


def learning_curve(trial: Trial, x_key: str, last_step: float = math.inf) -> tuple[list[float], list[float]]:
    """The log points of a run, up to ``last_step``, at which episodes had ended: ``x_key`` and their mean return."""
    points = [row for row in points_until(trial, last_step) if row.get("charts/episodic_return") is not None]
    return [row[x_key] for row in points], [row["charts/episodic_return"] for row in points]


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves over the range that they share, by linear interpolation; empty where they share none."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, end, num=max(len(x) for x, _ in curves) if start <= end else 0)
    return grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)


def draw(record: dict, trials: Sequence[Trial]):
    """The figure: bars of sps; episodic return against steps, as far as all have come; and against wall clock."""
    rows = record["rows"]
    figure = new_figure(16, max(4.8, 1.6 + 0.75 * len(rows)))
    bars, steps, clock = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
    notes = [f"{mean_std(row['sps'])}  ({np.mean(row['speedup']):.1f}x)" if row["speedup"] else "" for row in rows]
    draw_bars(
        bars,
        labels=[row["mode"] for row in rows],
        lengths=[np.mean(row["sps"]) if row["sps"] else None for row in rows],
        points=[row["sps"] for row in rows],
        notes=notes,
        title="Environment steps per second",
    )
    draw_returns(steps, trials, rows, "global_step", "environment steps", rows[0]["return_step"])
    draw_returns(clock, trials, rows, "charts/wall_seconds", "seconds of wall clock, warm-up included")
    figure.suptitle(title(record), fontsize=12)
    return figure


def draw_returns(
    axes, trials: Sequence[Trial], rows: Sequence[dict], x_key: str, x_label: str, last_step: float = math.inf
) -> None:
    """Episodic return against ``x_key``: the mean over seeds in bold, each seed thin, colours as in the bars."""
    for row, color in zip(rows, itertools.cycle(COLORS)):
        curves = [learning_curve(t, x_key, last_step) for t in trials if t.label == row["mode"] and not t.failure]
        curves = [curve for curve in curves if curve[0]]
        if len(curves) > 1:
            for curve in curves:
                axes.plot(*curve, color=color, linewidth=0.8, alpha=0.3, marker="." if len(curve[0]) == 1 else "")
        if curves:
            x, y = mean_curve(curves)
            axes.plot(x, y, color=color, linewidth=2, marker="." if len(x) < 10 else "")
    if not axes.lines:
        axes.text(0.5, 0.5, "no episode ended", transform=axes.transAxes, ha="center", color="gray")
    axes.set_title("Episodic return in training, colours as in the bars", loc="left")
    axes.set_xlabel(x_label)
    axes.set_xlim(left=0)
    clean(axes)


if __name__ == "__main__":
    run_tool(main, Args)
