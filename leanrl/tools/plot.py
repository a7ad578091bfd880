"""Draws learning curves: return against environment steps and against wall clock, one column per environment.

Runs of the same script, mode and environment form a group. Its line is the interquartile mean (IQM) over seeds and its
band rliable's 95 % stratified bootstrap interval, both of the mean over the last 100 training episodes. With the
picture, the tool writes the raw curves as CSV and, as markdown, the final returns (CleanRL's metric: mean of the last
100 training episodes) and how far the groups' intervals overlap.

    python -m leanrl.tools.plot runs
    python -m leanrl.tools.plot 'runs/Hopper*' --out plots/hopper
    python -m leanrl.tools.plot --csv plots/hopper.csv --out plots/hopper_again
    python -m leanrl.tools.plot runs --env-ids Hopper-v5 --max-steps 200000 --no-wall-clock

With --timeline it instead draws who waited for whom in a distributed run: a row per actor thread or
learner, a bar per interval.

    python -m leanrl.tools.plot runs/my_cleanba_run --timeline 10
"""

# What ./run.sh installs for this tool, besides the common requirements:
# requires: dev

import glob
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

from leanrl.sebulba.records import TIMELINE_FILE
from leanrl.support.cli import RunArgs, read_args_json
from leanrl.support.errors import UsageError, bad, require_at_least
from leanrl.support.tracking import read_metrics
from leanrl.tools.common import COLORS, clean, colors_of, markdown_table, mean_std, new_figure, rounded, run_tool
from leanrl.tools.trials import read_json, running_mean

RETURN = "charts/episodic_return"
REPS = 2000
"""bootstrap resamples"""
GRID_POINTS = 100

Curve = "pandas.DataFrame"  # a dev requirement; importing it takes 0.5 s, for which --help need not wait
COLUMNS = ["run", "script", "mode", "env_id", "seed", "global_step", "wall_seconds", "episodic_return", "episodes"]
COLUMNS += ["sps", "final", "finished"]
"""A curve has a row for each log point of a run at which episodes had ended: how many since the row before, and their
mean return. The same in all rows are ``sps``, after warm-up; ``final``, the mean return of the last 100 episodes as the
run itself counted them, NaN before it ended; and ``args``, which is not in the CSV."""


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """run directories, folders that hold some, or globs of either"""
    csv: tuple[Path, ...] = ()
    """curves written by this tool before, to draw together with the runs"""
    out: Path | None = None
    """where to write, without suffix: OUT.png, OUT.csv and OUT.md; by default plots/episodic_return"""
    timeline: int | None = None
    """draw the last TIMELINE iterations of each run, as RUN_DIR/timeline.png"""
    env_ids: tuple[str, ...] = ()
    """draw these environments alone"""
    max_steps: int | None = None
    """leave out everything after this many environment steps"""
    wall_clock: bool = True
    """also draw against wall clock, which means little for runs that were paused or shared a machine"""


# ------------------------------------------------------------------------------------------------------------ CURVES


@contextmanager
def errors_of(name: str, verb: str) -> Iterator[None]:
    """Turns errors with a file into a UsageError: ``NAME: cannot be VERB (...)``."""
    try:
        yield
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: cannot be {verb} ({type(error).__name__}: {error})") from None


def mode_of(args: dict) -> str:
    """``eager``, or what a run switched on: ``compile+cudagraphs``, ``compile+bf16`` ..."""
    graphs = "one-graph" if args.get("one_graph") else "cudagraphs"  # implied by one-graph
    amp = args.get("amp", "none").removeprefix("none")
    words = [args.get("compile") and "compile", args.get("cudagraphs") and graphs, amp]
    return "+".join(filter(None, words)) or "eager"


def read_run(run_dir: Path) -> list[Curve]:
    """The one curve of a run directory, finished or still running.

    Raises:
        UsageError: it is not a run directory, is damaged, or no episode has ended.
    """
    import pandas as pd

    with errors_of(f"{run_dir}", "read"):
        facts, rows = read_args_json(run_dir), read_metrics(run_dir)
        points = pd.DataFrame([row for row in rows if row.get(RETURN) is not None])
        if points.empty:
            raise UsageError(f"{run_dir}: no episode has ended yet")
        summary = read_json(run_dir / "summary.json")
        if summary and summary["global_step"] < rows[-1]["global_step"]:
            summary = {}  # from before a resume
        run = {"run": str(run_dir), "script": facts["script"], "mode": mode_of(facts["args"])}
        run |= {name: facts["args"][name] for name in ("env_id", "seed")}
        run |= {"global_step": points["global_step"], "wall_seconds": points["charts/wall_seconds"]}
        run |= {"episodic_return": points[RETURN].astype(float), "args": [facts["args"]] * len(points)}
        run["episodes"] = np.diff(points["charts/episodes"], prepend=0)
        run["sps"] = summary.get("sps", points["charts/SPS"].iloc[-1])
        run["final"] = summary.get("episodic_return")
        run["finished"] = bool(summary) and not summary["interrupted"]
        return [pd.DataFrame(run).astype({"final": float})]


def read_csv(path: Path) -> list[Curve]:
    """The curves of a CSV that this tool wrote. UsageError: there is no such file, or it is no such CSV."""
    import pandas as pd

    with errors_of(f"{path}", "read"):
        exact = {"keep_default_na": False, "na_values": {"final": [""]}, "float_precision": "round_trip"}
        points = pd.read_csv(path, **exact)[COLUMNS]
        if points.empty:
            raise UsageError(f"{path}: has no rows")
        points = points.astype(dict.fromkeys(["wall_seconds", "episodic_return", "sps", "final"], float))
        points["args"] = [{}] * len(points)
        return [curve for _, curve in points.groupby(COLUMNS[:5], sort=False)]


def write_csv(path: Path, curves: Sequence[Curve]) -> None:
    """Writes the raw curves; ``read_csv`` returns the same numbers."""
    import pandas as pd

    pd.concat(curves)[COLUMNS].astype({"episodes": int, "finished": int}).to_csv(path, index=False)


def find_runs(argument: str) -> list[Path]:
    """Run directories that ``argument`` names, contains or matches. UsageError if there are none."""
    paths = [Path(match) for match in sorted(glob.glob(argument))] or [Path(argument)]
    runs = [file.parent for path in paths for file in sorted(path.rglob("args.json"))]
    if not runs:
        raise UsageError(f"{argument}: no run directory there")
    return runs


def read_curves(runs: Iterable[str], csvs: Iterable[Path]) -> list[Curve]:
    """Every curve in these places, each run once; what cannot be read is reported in one line and left out.

    Raises:
        UsageError: nothing could be read.
    """
    run_dirs = {run_dir.resolve(): run_dir for argument in runs for run_dir in find_runs(argument)}
    readers = [partial(read_run, run_dir) for run_dir in run_dirs.values()]
    curves, complaints = [], []
    for read in [*readers, *(partial(read_csv, path) for path in dict.fromkeys(csvs))]:
        try:
            curves += read()
        except UsageError as error:
            complaints.append(str(error))
    if not curves:
        raise UsageError(f"nothing to draw, {len(complaints)} unreadable: {complaints[0]}")
    for complaint in complaints:
        warn(complaint)
    return curves


# --------------------------------------------------------------------------------------------------------- ESTIMATES


def end(curve: Curve) -> float:
    """What the run reached: ``final``, or the end of the running mean if there is none."""
    final = curve["final"].iloc[0]
    return running_mean(curve["episodic_return"], curve["episodes"])[-1] if np.isnan(final) else final


class Band(NamedTuple):
    """IQM over seeds and its 95 % bootstrap interval; arrays are [G], on a grid that all seeds have reached."""

    x: np.ndarray
    iqm: np.ndarray
    low: np.ndarray
    high: np.ndarray


def estimate_iqm(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IQM over seeds of ``scores`` [S, G], and the ends of its 95 % stratified bootstrap interval, [G] each."""
    from rliable.library import get_interval_estimates

    def iqm_of_columns(scores: np.ndarray) -> np.ndarray:
        """[S, 1, G] -> [G]: ``rliable.metrics.aggregate_iqm`` of each, without SciPy's millisecond a call."""
        cut = len(scores) // 4
        return np.sort(scores[:, 0], axis=0)[cut : len(scores) - cut].mean(axis=0)

    # rliable 1.2 draws from NumPy's global generator, whatever its `random_state` is.
    np.random.seed(0)
    iqm, interval = get_interval_estimates({"group": scores[:, None]}, iqm_of_columns, reps=REPS)
    return iqm["group"], *interval["group"]


def estimate_band(curves: Sequence[Curve], axis: str) -> Band:
    """The band of one group's smoothed curves against ``axis`` (global_step or wall_seconds)."""
    xs = [curve[axis].to_numpy() for curve in curves]
    last = min(x[-1] for x in xs)
    grid = np.linspace(min(last, max(x[0] for x in xs)), last, GRID_POINTS)
    means = [running_mean(curve["episodic_return"], curve["episodes"]) for curve in curves]
    return Band(grid, *estimate_iqm(np.stack([np.interp(grid, *line) for line in zip(xs, means, strict=True)])))


def overlap(a: Band, b: Band) -> float | None:
    """The share of their common range in which the intervals overlap; None if they have no common range."""
    start, end = max(a.x[0], b.x[0]), min(a.x[-1], b.x[-1])
    if start > end:
        return None
    grid = np.linspace(start, end, GRID_POINTS)
    low, high = ([np.interp(grid, band.x, getattr(band, side)) for band in (a, b)] for side in ("low", "high"))
    return float(np.mean(np.maximum(*low) <= np.minimum(*high)))


# ------------------------------------------------------------------------------------------------------------ GROUPS

Groups = dict[tuple[str, str], list[Curve]]
"""(environment, SCRIPT:MODE) -> the runs of one line, by seed"""


def group_curves(curves: Iterable[Curve]) -> Groups:
    """The runs of each environment, script and mode; references and eager modes come first."""

    def identity(curve: Curve) -> tuple:
        env_id, script, mode, seed = curve[["env_id", "script", "mode", "seed"]].iloc[0]
        return env_id, script, mode != "eager", mode, seed

    groups = defaultdict(list)
    for curve in sorted(curves, key=identity):
        env_id, script, _, mode, _ = identity(curve)
        groups[env_id, f"{script}:{mode}"].append(curve)
    return groups


def warn(message: str) -> None:
    """One line on stderr about what was left out or needs care."""
    print(f"plot: {message}", file=sys.stderr)


def warn_of_weaknesses(groups: Groups) -> None:
    """Warns, in one line each, of what makes groups say less than they seem to."""
    # Flags for how a run is stored, not for what it learns.
    bookkeeping = {f.name for f in fields(RunArgs)} | {"seed"}
    for (env_id, label), curves in groups.items():
        name = f"{env_id}, {label}"
        if len(curves) < 3:
            warn(f"{name}: only {len(curves)} of at least 3 seeds; its interval means little")
        if len({curve["seed"].iloc[0] for curve in curves}) < len(curves):
            warn(f"{name}: some seeds appear more than once")
        args = [curve["args"].iloc[0] for curve in curves]
        keys = set(args[0]).intersection(*args) - bookkeeping
        differing = sorted(key for key in keys if any(other[key] != args[0][key] for other in args))
        if differing:
            warn(f"{name}: its runs differ in {', '.join(differing)}")
        ends = [curve["global_step"].iloc[-1] for curve in curves]
        if min(ends) < 0.9 * max(ends):
            shortest = f"drawn to step {min(ends):,.0f}, where its shortest run ends"
            warn(f"{name}: {shortest}; the longest has {max(ends):,.0f}")


# ------------------------------------------------------------------------------------------------ TABLES AND PICTURE


def finals_table(groups: Groups, with_speed: bool) -> str:
    """One row per group: what it reached at the end, and its speed if asked for."""
    rows = []
    for group, curves in groups.items():
        ends = [end(curve) for curve in curves]
        estimates = np.concatenate(estimate_iqm(np.array(ends)[:, None]))
        iqm, low, high = rounded(estimates, np.ptp(estimates))
        unfinished = sum(not curve["finished"].iloc[0] for curve in curves)
        seeds = f"{len(curves)}" + (f" ({unfinished} unfinished)" if unfinished else "")
        steps = min(curve["global_step"].iloc[-1] for curve in curves)
        interval = f"{iqm} [{low}, {high}]" if len(ends) > 1 else "-"
        row = [*group, seeds, f"{steps:,.0f}", mean_std(ends), interval]
        rows.append(row + [mean_std([curve["sps"].iloc[0] for curve in curves])] * with_speed)
    header = ["environment", "group", "seeds", "steps", "return, mean ± std", "IQM [95 % interval]"]
    return markdown_table(header + ["sps"] * with_speed, rows)


def overlap_table(bands: dict[tuple[str, str], Band]) -> str | None:
    """One row for each pair of groups of an environment; None if there is no pair."""
    rows = []
    for ((env_id, a), band_a), ((other_env_id, b), band_b) in itertools.combinations(bands.items(), 2):
        if env_id == other_env_id:
            share = overlap(band_a, band_b)
            rows.append([env_id, a, b, "-" if share is None else f"{share:.0%}"])
    header = ["environment", "group", "and group", "steps where their intervals overlap"]
    return markdown_table(header, rows) if rows else None


def draw_band(axes, band: Band, color: str, unit: float = 1.0):
    """The line of the IQM, which it returns, and the interval; x in ``unit``."""
    axes.fill_between(band.x / unit, band.low, band.high, color=color, alpha=0.2, linewidth=0)
    # Grey is the reference, drawn first: wide, it shows beneath a variant that lies on it.
    return axes.plot(band.x / unit, band.iqm, color=color, linewidth=3 if color == COLORS[0] else 1.6)[0]


def draw(groups: Groups, bands: dict[str, dict[tuple[str, str], Band]], caption: str):
    """A row of panels against steps and one against wall clock, one column per environment; each group has one colour.

    Args:
        bands: "global_step", and "wall_seconds" if it is to be drawn -> a band for each group.
    """
    from matplotlib.ticker import EngFormatter  # takes 0.5 s; --help need not wait for it

    env_ids, labels = (list(dict.fromkeys(names)) for names in zip(*groups, strict=True))
    colors = colors_of(labels)
    figure = new_figure(max(7.0, 3.6 * len(env_ids)), 0.4 + 3.3 * len(bands) + 0.22 * len(labels))
    panels = figure.subplots(len(bands), len(env_ids), squeeze=False, sharey="col")
    handles = {}
    for (row, axis), (column, env_id) in itertools.product(enumerate(bands), enumerate(env_ids)):
        axes, on_clock = panels[row, column], axis == "wall_seconds"
        for (env, label), band in bands[axis].items():
            if env == env_id:
                handles[label] = draw_band(axes, band, colors[label], 60 if on_clock else 1)
        clean(axes)
        unit = "minutes of wall clock" if on_clock else "environment steps"
        axes.set(title="" if row else env_id, xlabel=unit, ylabel="" if column else "return")
        axes.set_xlim(left=0)
        if not on_clock:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    seeds = {label: sorted({len(groups[group]) for group in groups if group[1] == label}) for label in handles}
    names = [f"{label} (seeds: {', '.join(map(str, counts))})" for label, counts in seeds.items()]
    figure.legend(handles.values(), names, loc="outside lower center", frameon=False, title=caption)
    return figure


def draw_curves(args: Args) -> int:
    """Draws learning curves and writes their tables."""
    if not args.runs and not args.csv:
        raise UsageError("name run directories, folders of them, or --csv FILES")
    curves = read_curves(args.runs, args.csv)
    known = sorted({curve["env_id"].iloc[0] for curve in curves})
    if unknown := {*args.env_ids} - {*known}:
        raise bad("env_ids", sorted(unknown), f"no run has it; choose from {', '.join(known)}")
    curves = [curve for curve in curves if not args.env_ids or curve["env_id"].iloc[0] in args.env_ids]
    if args.max_steps is not None:
        early = [curve[curve["global_step"] <= args.max_steps] for curve in curves]
        # What a run reached later is left out.
        cut = [e if len(e) == len(curve) else e.assign(final=np.nan) for e, curve in zip(early, curves, strict=True)]
        curves = [curve for curve in cut if len(curve)]
        if not curves:
            raise bad("max_steps", args.max_steps, "is before the first log point")
        if len(curves) < len(cut):
            warn(f"{len(cut) - len(curves)} of {len(cut)} runs left out: no log point before --max-steps")
    groups = group_curves(curves)
    warn_of_weaknesses(groups)

    bands = {"global_step": {}} | ({"wall_seconds": {}} if args.wall_clock else {})
    jobs = [(axis, group) for axis in bands for group in groups]
    # disable=None: only on a terminal.
    for axis, group in tqdm(jobs, desc="bootstrap", unit="curve", delay=1, leave=False, disable=None):
        bands[axis][group] = estimate_band(groups[group], axis)

    caption = "IQM over seeds of the mean of the last 100 episodes; bands are 95 % stratified bootstrap intervals"
    tables = "\n\n".join(filter(None, (finals_table(groups, args.wall_clock), overlap_table(bands["global_step"]))))
    out = args.out or Path("plots", "episodic_return")
    with errors_of(f"--out {out}", "written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(Path(f"{out}.csv"), curves)
        draw(groups, bands, caption).savefig(f"{out}.png", dpi=150)
        Path(f"{out}.md").write_text(f"{tables}\n\nCurves: {caption}.\n")
    print(f"{tables}\n\npicture, raw curves and tables: {out}.png, .csv and .md")
    return 0


# ---------------------------------------------------------------------------------------------------------- TIMELINES

Spans = dict[str, list[tuple[str, float, float]]]
"""actor thread or learner -> (what it did, from, to), in seconds from the first start"""


def read_spans(run_dir: Path, last: int) -> Spans:
    """The last iterations of a distributed run. UsageError: there is no timeline, or it is damaged."""
    path, spans = run_dir / TIMELINE_FILE, defaultdict(list)
    with errors_of(f"{path}", "read"):
        for row in read_metrics(run_dir, TIMELINE_FILE)[-last:]:
            for name, part in row["spans"].items():
                spans[name] += [(str(what), float(start), float(end)) for what, start, end in part]
    if not any(spans.values()):
        raise UsageError(f"{path}: has no iteration; distributed runs write it")
    first = min(start for part in spans.values() for _, start, _ in part)
    return {name: [(what, start - first, end - first) for what, start, end in part] for name, part in spans.items()}


def shares_table(spans: Spans) -> str:
    """For every kind of interval of every actor thread and learner, its share of the time that is drawn."""
    whole = max(end for part in spans.values() for *_, end in part)
    rows = []
    for name, part in spans.items():
        for kind in dict.fromkeys(what for what, *_ in part):
            seconds = sum(end - start for what, start, end in part if what == kind)
            rows.append((name, kind, f"{seconds / whole:.0%}"))
    return markdown_table(("part", "what", "of the time"), rows)


def draw_spans(spans: Spans, title: str):
    """The figure: a row per actor thread or learner, a bar per interval; waiting is pale."""
    from matplotlib.patches import Patch

    figure = new_figure(13, 1.6 + 0.5 * len(spans))
    axes = figure.subplots()
    clean(axes)
    kinds = dict.fromkeys(what for part in spans.values() for what, *_ in part)
    looks = {
        kind: {"facecolor": color, "edgecolor": "white", "alpha": 0.25 if kind.startswith("wait") else 1.0}
        for kind, color in zip(kinds, itertools.cycle(COLORS[1:]))
    }
    for row, part in enumerate(spans.values()):
        for kind, look in looks.items():
            bars = [(start, end - start) for what, start, end in part if what == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), linewidth=0.3, **look)
    axes.set_yticks(range(len(spans)), list(spans))
    axes.set_ylim(len(spans) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left")
    patches = [Patch(label=kind, **look) for kind, look in looks.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(looks), frameon=False)
    return figure


def draw_timelines(args: Args) -> int:
    """Draws each run's timeline, and prints what its actor threads and learners spent their time on."""
    run_dirs = [run_dir for argument in args.runs for run_dir in find_runs(argument)]
    if not run_dirs or args.csv:
        raise bad("timeline", args.timeline, "is drawn from the run directories of distributed scripts; name some")
    for run_dir in run_dirs:
        spans = read_spans(run_dir, args.timeline)
        picture = run_dir / "timeline.png"
        with errors_of(f"{picture}", "written"):
            draw_spans(spans, f"{run_dir.resolve().name}: its last iterations").savefig(picture)
        print(f"{shares_table(spans)}\n\npicture: {picture}")
    return 0


# --------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> int:
    require_at_least(args, 1, "timeline", "max_steps")
    return draw_curves(args) if args.timeline is None else draw_timelines(args)


if __name__ == "__main__":
    run_tool(main, Args)
