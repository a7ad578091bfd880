"""Draws learning curves: return against environment steps and against wall clock, one column per environment.

Runs of the same script, mode and environment are one group: its line is the interquartile mean (IQM) over seeds, the
band rliable's 95 % stratified bootstrap interval. Beside the picture it writes the raw curves as CSV and, as markdown,
the final returns (CleanRL's metric: mean of the last 100 training episodes) and how far the groups' intervals overlap.

    python -m leanrl.tools.plot runs
    python -m leanrl.tools.plot 'runs/Hopper*' --out plots/hopper --labels ppo_continuous_action:eager=reference
    python -m leanrl.tools.plot --csv plots/hopper.csv --out plots/hopper_again
    python -m leanrl.tools.plot runs --metric losses/value_loss
    python -m leanrl.tools.plot runs --env-ids Hopper-v5 --max-steps 200000 --no-wall-clock

With --timeline it draws who waited for whom in a distributed run instead: a row a part, a bar an interval.

    python -m leanrl.tools.plot runs/my_cleanba_run --timeline 10
"""

# What ./run.sh installs for it, beside what everything needs:
# requires: dev

import csv
import glob
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from leanrl.support.cli import RunArgs, read_args_json
from leanrl.support.errors import UsageError, bad, pip_command, require_at_least
from leanrl.support.tracking import read_metrics
from leanrl.tools import timeline
from leanrl.tools.common import COLORS, clean, markdown_table, mean_std, run_tool

RETURN = "charts/episodic_return"
# A log point's value of these is the mean over the episodes that ended since the log point before it.
PER_EPISODE = (RETURN, "charts/episodic_length")
GRID_POINTS = 100


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """run directories, folders that hold some, or globs of either"""
    csv: tuple[Path, ...] = ()
    """curves that this tool wrote before, drawn together with the runs"""
    out: Path | None = None
    """where to write, without suffix: OUT.png, OUT.csv and OUT.md; by default plots/METRIC"""
    timeline: int | None = None
    """draw the last TIMELINE iterations of each run, as OUT.png or by default RUN_DIR/timeline.png"""
    labels: tuple[str, ...] = ()
    """SCRIPT:MODE=NAME each: what to call a group; groups of one name become one"""
    metric: str = RETURN
    """the key of metrics.jsonl to draw"""
    window: int = 100
    """episodes that the running mean goes over (log points, where the metric is not one of episodes)"""
    reps: int = 2000
    """bootstrap resamples"""
    env_ids: tuple[str, ...] = ()
    """draw these environments alone"""
    max_steps: int | None = None
    """leave out what came after so many environment steps"""
    wall_clock: bool = True
    """draw against wall clock too, which means little for runs that were paused or shared a machine"""


# ------------------------------------------------------------------------------------------------------------ CURVES


@dataclass(frozen=True)
class Curve:
    """The log points of one run that have the metric, as they were written; arrays are [P]."""

    run: str
    script: str
    mode: str
    env_id: str
    seed: int
    global_step: np.ndarray
    wall_seconds: np.ndarray
    values: np.ndarray
    episodes: np.ndarray
    """how many episodes each value is the mean of; 1 where the metric is not one of episodes"""
    sps: float
    """environment steps per second after warm-up"""
    final: float | None
    """mean return of the last 100 episodes as the run itself counted them; None before it ended"""
    finished: bool
    args: dict = field(default_factory=dict)
    """the run's arguments; empty when read from a CSV"""

    def smooth(self, window: int) -> np.ndarray:
        """The running mean of the values, [P]."""
        return running_mean(self.values, self.episodes, window)

    def end(self, window: int) -> float:
        """What the run reached: ``final``, or where there is none the end of the running mean."""
        return self.smooth(window)[-1] if self.final is None else self.final

    def until(self, max_steps: int) -> "Curve":
        """Its log points of the first ``max_steps`` environment steps, of which there may be none."""
        count = int((self.global_step <= max_steps).sum())
        if count == len(self.values):
            return self
        columns = ("global_step", "wall_seconds", "values", "episodes")
        return replace(self, final=None, **{name: getattr(self, name)[:count] for name in columns})


def running_mean(values: np.ndarray, episodes: np.ndarray, window: int) -> np.ndarray:
    """At each of P log points the mean over the last ``window`` episodes, or over all while there are fewer.

    Args:
        values, episodes: [P]; the mean of the episodes since the point before, and their number.
    """
    ends = np.cumsum(episodes)
    starts = np.maximum(ends - window, 0)
    sums = np.concatenate([[0.0], np.cumsum(values * episodes)])
    # A window that begins between two log points takes its share of the second one.
    return (sums[1:] - np.interp(starts, np.concatenate([[0], ends]), sums)) / (ends - starts)


def mode_of(args: dict) -> str:
    """``eager``, or what a run switched on, joined as ``compare`` writes it: ``compile+cudagraphs``."""
    graphs = "one-graph" if args.get("one_graph") else "cudagraphs"  # which one-graph implies
    words = [word for name, word in (("compile", "compile"), ("cudagraphs", graphs)) if args.get(name)]
    if args.get("amp", "none") != "none":
        words.append(args["amp"])
    return "+".join(words) or "eager"


def read_run(run_dir: Path, metric: str) -> list[Curve]:
    """The one curve of a run directory, be it finished or still under way.

    Raises:
        UsageError: not a run directory, damaged, or without a log point that has the metric.
    """
    try:
        facts = read_args_json(run_dir)
        rows = read_metrics(run_dir)
        points = [row for row in rows if row.get(metric) is not None]
        if not points:
            raise UsageError(f"{run_dir}: has no log point with {metric} yet")
        steps, wall_seconds, values = (
            np.array([point[key] for point in points], float) for key in ("global_step", "charts/wall_seconds", metric)
        )
        episodes = np.ones(len(points))
        if metric in PER_EPISODE and all("charts/episodes" in point for point in points):
            episodes = np.diff([point["charts/episodes"] for point in points], prepend=0)
        summary = read_summary(run_dir, rows[-1]["global_step"])
        curve = Curve(
            run=str(run_dir),
            script=facts["script"],
            mode=mode_of(facts["args"]),
            env_id=facts["args"]["env_id"],
            seed=facts["args"]["seed"],
            global_step=steps,
            wall_seconds=wall_seconds,
            values=values,
            episodes=episodes,
            sps=rows[-1]["charts/SPS"] if summary is None else summary["sps"],
            final=None if summary is None or metric != RETURN else summary["episodic_return"],
            finished=summary is not None and not summary["interrupted"],
            args=facts["args"],
        )
        return [curve]
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{run_dir}: cannot be read ({type(error).__name__}: {error})") from None


def read_summary(run_dir: Path, last_step: int) -> dict | None:
    """``summary.json``, or None while the run is under way: one from before a resume lags behind the metrics."""
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else None
    return summary if summary is not None and summary["global_step"] >= last_step else None


def find_runs(argument: str) -> list[Path]:
    """Run directories that ``argument`` names, holds or matches. UsageError where there are none."""
    paths = [Path(match) for match in sorted(glob.glob(argument))] or [Path(argument)]
    runs = [file.parent for path in paths for file in sorted(path.rglob("args.json"))]
    if not runs:
        raise UsageError(f"{argument}: no run directory there")
    return runs


def read_curves(runs: Iterable[str], csvs: Iterable[Path], metric: str) -> tuple[list[Curve], list[str]]:
    """Every curve there is in these places, each run once, and a line about each that cannot be read."""
    curves, complaints = {}, []

    def attempt(read: Callable, *arguments) -> list:
        try:
            return read(*arguments)
        except UsageError as error:
            complaints.append(str(error))
            return []

    for run_dir in [run_dir for argument in runs for run_dir in attempt(find_runs, argument)]:
        if run_dir.resolve() not in curves:
            curves[run_dir.resolve()] = attempt(read_run, run_dir, metric)
    for path in csvs:
        curves[path] = attempt(read_csv, path, metric)
    return [curve for group in curves.values() for curve in group], complaints


# --------------------------------------------------------------------------------------------------------------- CSV


def csv_columns(metric: str) -> list[str]:
    """One row a log point; the last three columns are the run's, the same in each of its rows."""
    identity = ["run", "script", "mode", "env_id", "seed"]
    point = ["global_step", "wall_seconds", metric.removeprefix("charts/"), "episodes"]
    return [*identity, *point, "sps", "final", "finished"]


def write_csv(path: Path, curves: Iterable[Curve], metric: str) -> None:
    """Writes the raw curves, from which ``read_csv`` gives the same numbers back."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(csv_columns(metric))
        for c in curves:
            for step, seconds, value, episodes in zip(c.global_step, c.wall_seconds, c.values, c.episodes, strict=True):
                point = [int(step), float(seconds), float(value), int(episodes)]
                writer.writerow([c.run, c.script, c.mode, c.env_id, c.seed, *point, c.sps, c.final, int(c.finished)])


def read_csv(path: Path, metric: str) -> list[Curve]:
    """The curves that ``write_csv`` wrote.

    Raises:
        UsageError: no such file, or not one of these.
    """
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise UsageError(f"{path}: has no rows")
        columns = csv_columns(metric)
        runs = {}
        for row in rows:
            runs.setdefault(tuple(row[name] for name in columns[:5]), []).append(row)
        curves = []
        for (run, script, mode, env_id, seed), points in runs.items():
            arrays = [np.array([point[name] for point in points], float) for name in columns[5:9]]
            sps, final, finished = (points[-1][name] for name in columns[9:])
            end = (float(sps), float(final) if final else None, finished == "1")
            curves.append(Curve(run, script, mode, env_id, int(seed), *arrays, *end))
        return curves
    except KeyError as error:
        raise UsageError(f"{path}: has no column {error}") from None
    except (csv.Error, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None


# --------------------------------------------------------------------------------------------------------- ESTIMATES


@dataclass(frozen=True)
class Band:
    """IQM over seeds and its 95 % bootstrap interval; arrays are [G], on a grid that all seeds have reached."""

    x: np.ndarray
    iqm: np.ndarray
    low: np.ndarray
    high: np.ndarray


def iqm_of_columns(scores: np.ndarray) -> np.ndarray:
    """[S, 1, G] -> [G]: ``rliable.metrics.aggregate_iqm`` of each column, thirty times as fast as one by one."""
    from scipy.stats import trim_mean

    return trim_mean(scores[:, 0], 0.25, axis=0)


def estimate_iqm(scores: np.ndarray, reps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IQM over seeds of ``scores`` [S, G], and the ends of its 95 % stratified bootstrap interval, [G] each."""
    from rliable.library import get_interval_estimates

    # rliable 1.2 draws from NumPy's global generator, whatever its `random_state` is.
    np.random.seed(0)
    iqm, interval = get_interval_estimates({"group": scores[:, None]}, iqm_of_columns, reps=reps)
    return iqm["group"], *interval["group"]


def require_rliable() -> None:
    """UsageError unless rliable can be imported."""
    try:
        import rliable.library  # noqa: F401
    except Exception as error:  # with pandas 3, arch 7, which rliable needs, dies of a TypeError
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"rliable cannot be imported ({reason}); {pip_command('dev')}") from None


def estimate_band(curves: Sequence[Curve], axis: str, window: int, reps: int) -> Band:
    """The band of one group's smoothed curves against ``axis`` (global_step or wall_seconds)."""
    xs = [getattr(curve, axis) for curve in curves]
    end = min(x[-1] for x in xs)
    grid = np.linspace(min(end, max(x[0] for x in xs)), end, GRID_POINTS)
    scores = np.stack([np.interp(grid, x, curve.smooth(window)) for x, curve in zip(xs, curves, strict=True)])
    return Band(grid, *estimate_iqm(scores, reps))


def overlap(a: Band, b: Band) -> float | None:
    """The share of the range that both cover in which their intervals overlap; None where they share no range."""
    start, end = max(a.x[0], b.x[0]), min(a.x[-1], b.x[-1])
    if start > end:
        return None
    grid = np.linspace(start, end, GRID_POINTS)
    low, high = ([np.interp(grid, band.x, getattr(band, side)) for band in (a, b)] for side in ("low", "high"))
    return float(np.mean(np.maximum(*low) <= np.minimum(*high)))


# ------------------------------------------------------------------------------------------------------------ GROUPS

Groups = dict[tuple[str, str], list[Curve]]
"""(environment, label) -> the runs of one line, by seed"""


def group_curves(curves: Iterable[Curve], labels: Sequence[str]) -> Groups:
    """Groups runs by environment and ``SCRIPT:MODE``, or the name that ``labels`` (OLD=NEW each) give it.

    Raises:
        UsageError: a label that is none, or names no group.
    """
    known = {f"{curve.script}:{curve.mode}" for curve in curves}
    names = {}
    for label in labels:
        old, equals, new = label.partition("=")
        if not (equals and new) or old not in known:
            raise UsageError(f"--labels {label}: must be OLD=NEW, OLD one of {', '.join(sorted(known))}")
        names[old] = new
    groups = {}
    for curve in sorted(curves, key=lambda c: (c.env_id, c.script, c.mode != "eager", c.mode, c.seed)):
        default = f"{curve.script}:{curve.mode}"
        groups.setdefault((curve.env_id, names.get(default, default)), []).append(curve)
    return groups


def warn(message: str) -> None:
    """One line on stderr about what was left out or is to be taken with care."""
    print(f"plot: {message}", file=sys.stderr)


def warn_of_weaknesses(groups: Groups) -> None:
    """Tells, one line each, what makes groups say less than they seem to."""
    # How a run is kept, not what it learns.
    bookkeeping = {f.name for f in fields(RunArgs)} | {"seed"}
    for (env_id, label), curves in groups.items():
        name = f"{env_id}, {label}"
        if len(curves) < 3:
            warn(f"{name}: only {len(curves)} of at least 3 seeds, its interval means little")
        if len({curve.seed for curve in curves}) < len(curves):
            warn(f"{name}: some seeds are there more than once")
        keys = set.intersection(*(set(curve.args) for curve in curves)) - bookkeeping
        differing = sorted(key for key in keys if any(c.args[key] != curves[0].args[key] for c in curves))
        if differing:
            warn(f"{name}: its runs differ in {', '.join(differing)}")
        ends = [curve.global_step[-1] for curve in curves]
        if min(ends) < 0.9 * max(ends):
            warn(
                f"{name}: drawn to step {min(ends):,.0f}, where its shortest run ends; the longest has {max(ends):,.0f}"
            )


# ------------------------------------------------------------------------------------------------ TABLES AND PICTURE


def finals_table(groups: Groups, args: Args) -> str:
    """One row a group: what it reached at the end, and how fast."""
    digits = 1 if args.metric in PER_EPISODE else 4
    rows = []
    for (env_id, label), curves in groups.items():
        ends = [curve.end(args.window) for curve in curves]
        iqm, low, high = (x.item() for x in estimate_iqm(np.array(ends)[:, None], args.reps))
        unfinished = sum(not curve.finished for curve in curves)
        rows.append(
            [
                env_id,
                label,
                f"{len(curves)}" + (f" ({unfinished} unfinished)" if unfinished else ""),
                f"{min(curve.global_step[-1] for curve in curves):,.0f}",
                mean_std(ends, digits),
                f"{iqm:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]",
                mean_std([curve.sps for curve in curves]),
            ]
        )
    name = "return" if args.metric == RETURN else args.metric
    header = ["environment", "group", "seeds", "steps", f"{name}, mean ± std", "IQM [95 % interval]", "sps"]
    return markdown_table(header, rows)


def overlap_table(bands: dict[tuple[str, str], Band]) -> str | None:
    """One row for each pair of groups of an environment; None where there is no pair."""
    rows = []
    for ((env_id, a), band_a), ((other_env_id, b), band_b) in itertools.combinations(bands.items(), 2):
        if env_id == other_env_id:
            share = overlap(band_a, band_b)
            rows.append([env_id, a, b, "-" if share is None else f"{share:.0%}"])
    return (
        markdown_table(["environment", "group", "and group", "steps where their intervals overlap"], rows)
        if rows
        else None
    )


def draw(groups: Groups, bands: dict[str, dict[tuple[str, str], Band]], caption: str, ylabel: str, path: Path) -> None:
    """A row of panels for steps and one for wall clock, one column per environment; a label has one colour in all.

    Args:
        bands: "global_step", and "wall_seconds" where that is to be drawn -> a band for each group.
    """
    from matplotlib.figure import Figure  # 0.5 s that --help need not wait for
    from matplotlib.ticker import EngFormatter

    env_ids = list(dict.fromkeys(env_id for env_id, _ in groups))
    labels = sorted({label for _, label in groups}, key=[label for _, label in groups].index)
    size = max(7.0, 4.6 * len(env_ids)), 0.4 + 3.3 * len(bands) + 0.22 * len(labels)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(bands), len(env_ids), squeeze=False, sharey="col")
    handles = {}
    for column, env_id in enumerate(env_ids):
        panels[0, column].set_title(env_id)
        for axes, axis in zip(panels[:, column], bands, strict=True):
            here = {label: band for (env, label), band in bands[axis].items() if env == env_id}
            scale = 1
            if axis == "global_step":
                axes.set_xlabel("environment steps")
            else:
                longest = max(band.x[-1] for band in here.values())
                units = (3600, "hours"), (60, "minutes"), (1, "seconds")
                scale, unit = next((scale, unit) for scale, unit in units if longest > 3 * scale or scale == 1)
                axes.set_xlabel(f"wall clock, {unit}")
            for label, band in here.items():
                color = COLORS[labels.index(label) % len(COLORS)]
                (handles[label],) = axes.plot(band.x / scale, band.iqm, color=color, linewidth=1.6)
                axes.fill_between(band.x / scale, band.low, band.high, color=color, alpha=0.2, linewidth=0)
            clean(axes)
            if axis == "global_step":
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_formatter("{x:,.10g}")
            axes.grid(alpha=0.25)
            axes.set_xlim(left=0)
    for axes in panels[:, 0]:
        axes.set_ylabel(ylabel)
    texts = []
    for label in labels:
        seeds = [len(curves) for (_, name), curves in groups.items() if name == label]
        counts = " to ".join(str(n) for n in sorted({min(seeds), max(seeds)}))
        texts.append(f"{label} ({counts} {'seed' if max(seeds) == 1 else 'seeds'})")
    legend = figure.legend(
        [handles[label] for label in labels], texts, loc="outside lower center", frameon=False, title=caption
    )
    legend.get_title().set_fontsize(9)
    figure.savefig(path, dpi=150)


def draw_timelines(args: Args) -> int:
    """Draws each run's timeline, and prints what part of the time each of its parts spent on what."""
    run_dirs = [run_dir for argument in args.runs for run_dir in find_runs(argument)]
    if not run_dirs or args.csv:
        raise bad("timeline", args.timeline, "is drawn from the run directories of distributed scripts; name some")
    if args.out is not None and len(run_dirs) > 1:
        raise bad("out", args.out, f"is one picture, and there are {len(run_dirs)} runs; leave it out or name one run")
    for run_dir in run_dirs:
        spans = timeline.read_spans(run_dir, args.timeline)
        out = args.out or run_dir / "timeline"
        picture = out.with_name(f"{out.name.removesuffix('.png')}.png")
        figure = timeline.draw(spans, f"{run_dir.resolve().name}: its last iterations")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(picture)
        except OSError as error:
            raise bad("out", out, f"cannot be written ({error.strerror})") from None
        print(f"{timeline.render(timeline.shares(spans))}\n\npicture: {picture}")
    return 0


def main(args: Args) -> int:
    require_at_least(args, 1, "window", "reps", "timeline", "max_steps")
    if args.timeline is not None:
        return draw_timelines(args)
    if not args.runs and not args.csv:
        raise UsageError("name run directories, folders of them, or --csv FILES")
    require_rliable()
    curves, complaints = read_curves(args.runs, args.csv, args.metric)
    if not curves:
        others = f" (and {len(complaints) - 1} more like it)" if len(complaints) > 1 else ""
        raise UsageError(f"nothing to draw: {complaints[0]}{others}")
    for complaint in complaints:
        warn(complaint)
    if args.env_ids:
        known = sorted({curve.env_id for curve in curves})
        for env_id in args.env_ids:
            if env_id not in known:
                raise bad("env_ids", env_id, f"no run has it; there are {', '.join(known)}")
        curves = [curve for curve in curves if curve.env_id in args.env_ids]
    if args.max_steps is not None:
        drawn = [curve for curve in (curve.until(args.max_steps) for curve in curves) if len(curve.values)]
        if not drawn:
            raise bad("max_steps", args.max_steps, "is before the first log point")
        if len(drawn) < len(curves):
            warn(f"{len(curves) - len(drawn)} of {len(curves)} runs left out: no log point before --max-steps")
        curves = drawn
    groups = group_curves(curves, args.labels)
    warn_of_weaknesses(groups)

    # disable=None: only on a terminal.
    bands = {"global_step": {}} | ({"wall_seconds": {}} if args.wall_clock else {})
    jobs = [(axis, group) for axis in bands for group in groups]
    for axis, group in tqdm(jobs, desc="bootstrap", unit="curve", delay=1, leave=False, disable=None):
        bands[axis][group] = estimate_band(groups[group], axis, args.window, args.reps)

    window = f"{args.window} {'episodes' if args.metric in PER_EPISODE else 'log points'}"
    caption = f"mean of the last {window}"
    if max(map(len, groups.values())) > 1:
        caption = f"IQM over seeds of the {caption}; bands are 95 % stratified bootstrap intervals"
    name = "return" if args.metric == RETURN else args.metric
    tables = "\n\n".join(filter(None, (finals_table(groups, args), overlap_table(bands["global_step"]))))
    out = args.out or Path("plots") / args.metric.split("/")[-1]
    picture, raw, markdown = (
        out.with_name(out.name.removesuffix(".png") + suffix) for suffix in (".png", ".csv", ".md")
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(raw, curves, args.metric)
        draw(groups, bands, caption, name, picture)
        markdown.write_text(f"{tables}\n\nCurves: {caption}.\n")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror})") from None
    print(f"{tables}\n\npicture: {picture}\nraw curves: {raw}\ntables: {markdown}")
    return 0


if __name__ == "__main__":
    run_tool(main, Args)
