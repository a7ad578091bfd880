"""Compares training scripts in any modes, and other libraries: one table, one picture, one JSON file.

A contender is SCRIPT[:MODE], or a peer such as sb3:PPO (Stable-Baselines3) or sbx:SAC, which has the hyperparameters of
our eager reference and takes its flags. A contender's own flags go inside its quotes, flags for all after --.

Every run is a process of its own, one at a time. The order reverses from seed to seed, and ratios are taken within a
seed. Speed is environment steps per second of wall clock after warm-up, measured by the same code for all. Returns are
compared at the last step that all have reached. With --sweep every contender runs at every value of a flag, and the
picture shows speed against that value.

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
from leanrl.tools import common, trials
from leanrl.tools.peers import PACKAGES, PEERS
from leanrl.tools.trials import Contender, Trial


@dataclass
class Args(common.OutArgs):
    contenders: tuple[str, ...] = ("ppo_continuous_action", "ppo_continuous_action_torchcompile")
    """SCRIPT[:MODE] or PEER each; MODE is eager, compile, cudagraphs, compile+one-graph ..., by default all that run
    here; PEER is sb3:PPO, sb3:PPO-Atari, sb3:SAC, sb3:TD3, sb3:DQN, the same for sbx (except Atari), rl_games:PPO"""
    sweep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FLAG VALUES")] = ()
    """a flag without dashes, and the numbers that it takes in turn, as in `num-envs 1 4 16`"""
    seeds: tuple[int, ...] = (1,)
    """every contender runs once with each seed; the runs with one seed are a round"""
    total_timesteps: int = 102_400
    """environment steps of a run"""
    max_seconds: float | None = 30.0
    """seconds of training (warm-up not counted) after which a run ends before its last step; None: never"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every contender"""


def main(args: Args) -> int:
    trials.require_distinct(args, "contenders", "seeds")
    flag, values = swept(args.sweep)
    reserved = (*trials.RESERVED_FLAGS, "--max-seconds", f"--{flag}")
    trials.check_flags(args.script_args, reserved)
    for entry in args.contenders:
        trials.check_flags(entry.split()[1:], (*reserved, "--device"))
    device = trials.target_device(args.script_args)
    flags = [f"--total-timesteps={args.total_timesteps}", f"--max-seconds={args.max_seconds}", *args.script_args]
    contenders = trials.contenders_of(args.contenders, "contenders", device, flags)
    # Runs at one value follow each other.
    points = {value: [at_value(contender, flag, value) for contender in contenders] for value in values}
    every = [*itertools.chain(*points.values())]
    for contender in every:
        trials.require_valid(contender)
    out = common.results_folder(args, "compare")
    results = trials.run_trials(every, args.seeds, out / "runs")
    labels = {value: [contender.label for contender in group] for value, group in points.items()}
    write(out, make_record("compare", results, labels, device, flag))
    return 130 if len(results) < len(every) * len(args.seeds) else int(any(trial.failure for trial in results))


# -------------------------------------------------------------------------------------------------------------- SWEEPS


def swept(sweep: Sequence[str]) -> tuple[str | None, list[str | None]]:
    """``--sweep``'s flag without dashes, and its values in the order of the x-axis; None and [None] without a sweep.

    Raises:
        UsageError: a flag that the tool sets itself, or values that are not different numbers above 0.
    """
    if not sweep:
        return None, [None]
    flag, *values = sweep[0].replace("_", "-"), *sweep[1:]
    if f"--{flag}" in (*trials.RESERVED_FLAGS, "--max-seconds", "--device"):
        raise bad("sweep", sweep, f"--{flag} is set by this tool itself, see --help")
    try:
        numbers = {float(value) for value in values}
    except ValueError:
        numbers = set()
    if not numbers or len(numbers) < len(values) or not all(0 < number < math.inf for number in numbers):
        raise bad("sweep", sweep, "must be a flag and numbers above 0, none repeated")
    return flag, sorted(values, key=float)


def at_value(contender: Contender, flag: str | None, value: str | None) -> Contender:
    """A contender with the swept flag, which its label shows; without a sweep, the contender itself."""
    if flag is None:
        return contender
    known = [field.name.replace("_", "-") for field in fields(trials.script_and_flags(contender)[0].Args)]
    if flag not in known:
        raise bad("sweep", flag, f"{contender.label} has no such flag{near_names(flag, known)}")
    word = f"--{flag}={value}"
    return replace(contender, label=f"{contender.label} {word}", command=(*contender.command, word))


def lines_of(rows: Sequence[dict], flag: str) -> dict[str, dict[str, dict]]:
    """The rows of a sweep: by contender (without the flag), then by value."""
    lines: dict[str, dict[str, dict]] = {}
    for row in rows:
        lines.setdefault(row["label"].removesuffix(f" --{flag}={row['value']}"), {})[row["value"]] = row
    return lines


# ------------------------------------------------------------------------------------------------------------ RESULTS


def make_record(
    tool: str,
    results: Sequence[Trial],
    labels: Mapping[str | None, Sequence[str]],
    device: torch.device,
    sweep: str | None = None,
) -> dict:
    """The contents of the JSON file; keys of ``labels`` are values of the flag ``sweep``, or None without a sweep."""
    peers = filter(None, map(trials.peer_of, itertools.chain(*labels.values())))
    packages = {package for peer in peers for package in PACKAGES[PEERS[peer].module]}
    rows = [{"value": value, **row} for value, group in labels.items() for row in summarize(results, group)]
    record = common.benchmark_record(tool, device, sorted(packages))
    return {**record, "sweep": sweep, "rows": rows, "runs": [asdict(trial) for trial in results]}


def write(out: Path, record: dict) -> None:
    """Writes a record's JSON, table and picture to ``out``, and prints the table."""
    text = f"{title(record)}\n\n{render_table(record['rows'], record['sweep'])}"
    common.write_results(out, "compare", record, text, draw(record))


def summarize(results: Sequence[Trial], labels: Sequence[str]) -> list[dict]:
    """One row per contender: what was measured in its successful runs, and why the others failed.

    Returns are those at ``return_step``, the last step that all these runs have reached. Speeds are divided by that of
    each peer in its fastest setting, or by that of the first contender if there is no peer.
    """
    good = {label: [trial for trial in results if trial.label == label and not trial.failure] for label in labels}

    def measured(label: str, key: str) -> list[float]:
        return [trial.summary[key] for trial in good[label] if trial.summary[key] is not None]

    def ratios(label: str, baseline: str) -> list[float]:
        # Within a seed, because its runs are close together in time and the machine's speed drifts.
        base = {trial.seed: trial.summary["sps"] for trial in good[baseline]}
        return [trial.summary["sps"] / base[trial.seed] for trial in good[label] if base.get(trial.seed)]

    return_step = min(itertools.chain(*(measured(label, "global_step") for label in labels)), default=0)
    # A peer's fastest setting is the last one here.
    rising = sorted(labels, key=lambda label: statistics.median(measured(label, "sps") or [0.0]))
    baselines = {f"vs {peer}": label for label in [*labels, *rising] if (peer := trials.peer_of(label))}
    baselines = baselines or {"speed-up": labels[0]}
    return [
        {
            "label": label,
            "sps": measured(label, "sps"),
            "ratios": {name: ratios(label, baseline) for name, baseline in baselines.items()},
            "warmup_seconds": measured(label, "warmup_seconds"),
            "return_step": return_step,
            "episodic_return": [float(mean) for t in good[label] for mean in points_until(t, return_step)[1][-1:]],
            "global_step": measured(label, "global_step"),
            "peak_memory_mb": [trial.peak_memory_mb for trial in good[label] if trial.peak_memory_mb],
            "failures": [trial.failure for trial in results if trial.label == label and trial.failure],
        }
        for label in labels
    ]


def points_until(trial: Trial, step: float) -> tuple[list[dict], np.ndarray]:
    """A run's log points up to ``step`` at which episodes had ended, and at each the mean return of the last 100."""
    points = [p for p in trial.metrics if p["global_step"] <= step and p.get("charts/episodic_return") is not None]
    episodes = np.diff([point["charts/episodes"] for point in points], prepend=0)
    return points, trials.running_mean([point["charts/episodic_return"] for point in points], episodes)


def render_table(rows: Sequence[dict], sweep: str | None = None) -> str:
    """The rows as a markdown table with a legend; for a ``sweep`` over a flag, its speeds, a column for each value."""
    if sweep:
        cells = [
            (
                line + common.failure_note([*itertools.chain(*(row["failures"] for row in at.values()))]),
                *(common.median_speed(row["sps"]) for row in at.values()),
            )
            for line, at in lines_of(rows, sweep).items()
        ]
        table = common.markdown_table((f"sps at --{sweep}", *dict.fromkeys(row["value"] for row in rows)), cells)
        return f"{table}\n\nsps: environment steps per second after warm-up, medians over rounds."
    several = any(len(row["sps"]) > 1 for row in rows)

    def column(key: str, show: Callable = common.median, **how) -> list[str]:
        return [show(row[key], **how) for row in rows]

    columns = {
        "program": [row["label"] + common.failure_note(row["failures"]) for row in rows],
        "sps of each round": [" ".join(f"{sps:,.0f}" for sps in row["sps"]) or "-" for row in rows if several],
        "median sps" if several else "sps": column("sps", common.median_speed),
        **{
            name: [common.median(row["ratios"][name], digits=2) + "x" * bool(row["ratios"][name]) for row in rows]
            for name in rows[0]["ratios"]
        },
        "warm-up s": column("warmup_seconds", digits=1),
        f"return at step {rows[0]['return_step']:,}": column("episodic_return", common.mean_std),
        "steps": column("global_step"),
        "peak MB": column("peak_memory_mb"),
    }
    columns = {name: column for name, column in columns.items() if {*column} - {"-"}}
    table = common.markdown_table([*columns], [*zip(*columns.values(), strict=True)])
    legend = (
        "sps: environment steps per second after warm-up; return: mean of the last 100 training episodes at the last "
        "step that all have reached; peak MB: the run's peak RAM."
    )
    if several:
        legend += "\nReturns: mean ± standard deviation over rounds; all else: medians (of the ratios within a round)."
    return f"{table}\n\n{legend}"


def title(record: dict) -> str:
    """What was run, and where: ``HalfCheetah-v5, seeds 1 2, AMD EPYC ...``; below, everyone's flags."""
    env_ids = sorted({run["args"]["args"]["env_id"] for run in record["runs"] if run["args"]})
    seeds = sorted({run["seed"] for run in record["runs"]})
    versions = record["machine"]["versions"]
    peers = [f"{name} {versions[name]}" for name in itertools.chain(*PACKAGES.values()) if name in versions]
    what = ", ".join([*env_ids, common.plural("seed", seeds), common.describe_machine(record["machine"]), *peers])
    return "\n".join(filter(None, (what, record["command"].partition(" -- ")[2])))


# ------------------------------------------------------------------------------------------------------------- PICTURE


def draw(record: dict):
    """The figure: for a sweep, sps against the flag's value, otherwise bars of sps.

    If episodes have ended, also their return against steps and against wall clock.
    """
    rows, results = record["rows"], [Trial(**run) for run in record["runs"]]
    if record["sweep"]:
        figure = common.new_figure(9, 5 + 0.23 * len(lines_of(rows, record["sweep"])))
        draw_sweep(figure, rows, record["sweep"])
    else:
        has_returns = any(row["episodic_return"] for row in rows)
        figure = common.new_figure(16 if has_returns else 8, max(4.8, 1.6 + 0.75 * len(rows)))
        bars, *curves = figure.subplots(1, 3 if has_returns else 1, squeeze=False)[0]
        draw_speeds(bars, rows)
        if curves:
            draw_returns(curves[0], results, rows, "global_step", "environment steps")
            draw_returns(curves[1], results, rows, "charts/wall_seconds", "seconds of wall clock, warm-up included")
    width = int(11 * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title(record).splitlines()), fontsize=11)
    return figure


def draw_speeds(axes, rows: Sequence[dict]) -> None:
    """Bars of the median sps, the first on top, with a dot for each round and the table's ratios.

    Each label is above its bar and each note at its end, so that nothing overlaps however long they are, and the bars
    serve as the legend of the figure.
    """
    longest = max(itertools.chain(*(row["sps"] for row in rows)), default=1.0)
    colors = common.colors_of(row["label"] for row in rows)
    for i, row in enumerate(rows):
        axes.text(0.005 * longest, i - 0.27, row["label"], va="bottom", fontsize=10)
        axes.barh(i, statistics.median(row["sps"] or [0.0]), height=0.42, color=colors[row["label"]])
        if len(row["sps"]) > 1:
            axes.plot(row["sps"], [i] * len(row["sps"]), "o", color="black", markersize=3.5, alpha=0.6)
        ratios = ", ".join(f"{statistics.median(ratios):.1f}x" for ratios in row["ratios"].values() if ratios)
        note = f"{common.median_speed(row['sps'])}  ({ratios})" if row["sps"] else "failed"
        axes.text(max(row["sps"], default=0.0) + 0.02 * longest, i, note, va="center", fontsize=10, fontweight="bold")
    # Leave room for the notes, which start where the bars end.
    axes.set(xlim=(0, 1.65 * longest), ylim=(len(rows) - 0.55, -0.75), yticks=[])
    axes.set_title(f"Environment steps per second ({', '.join(rows[0]['ratios'])})", loc="left")
    common.clean(axes)


def draw_sweep(figure, rows: Sequence[dict], flag: str) -> None:
    """sps against the flag's value: a line through the medians, a dot for each round, and the legend below."""
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    common.clean(axes)
    # All colours solid, then all dashed, ...; not the first colour, which means the eager reference elsewhere.
    styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), common.COLORS[1:]))
    for (line, at), (style, color) in zip(lines_of(rows, flag).items(), styles, strict=False):
        medians = [(float(value), statistics.median(row["sps"])) for value, row in at.items() if row["sps"]]
        rounds = [(float(value), sps) for value, row in at.items() for sps in row["sps"]]
        label = line + ("" if medians else " (failed)")
        axes.plot(*np.reshape(medians, (-1, 2)).T, style, color=color, linewidth=1.8, label=label)
        axes.plot(*np.reshape(rounds, (-1, 2)).T, "o", color=color, markersize=5, alpha=0.6, markeredgewidth=0)
    values = list(dict.fromkeys(row["value"] for row in rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks([float(value) for value in values], values)
    axes.set_xlabel(f"--{flag}")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.set_title("Environment steps per second, both axes logarithmic", loc="left")
    # The legend has the order of the lines' right ends.
    handles = sorted(axes.get_legend_handles_labels()[0], key=lambda line: -max(line.get_ydata()[-1:], default=0.0))
    figure.legend(handles=handles, loc="outside lower center", frameon=False)


def draw_returns(axes, results: Sequence[Trial], rows: Sequence[dict], x_key: str, x_label: str) -> None:
    """Return of the last 100 episodes against ``x_key``, up to the last step that all have reached.

    A line for each seed, colours as in the bars.
    """
    colors = common.colors_of(row["label"] for row in rows)
    for trial in results:
        points, means = points_until(trial, rows[0]["return_step"])
        if points and not trial.failure:
            x = [point[x_key] for point in points]
            axes.plot(x, means, color=colors[trial.label], linewidth=1.4, marker="." if len(x) < 10 else "")
    axes.set_title("Return of the last 100 episodes, colours as in the bars", loc="left")
    axes.set_xlabel(x_label)
    axes.set_xlim(left=0)
    common.clean(axes)


if __name__ == "__main__":
    common.run_tool(main, Args)
