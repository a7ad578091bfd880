"""Who waited for whom in a distributed run, from its timeline.jsonl: what ``plot --timeline`` draws and prints."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from leanrl.sebulba.learner import TIMELINE_FILE
from leanrl.support.errors import UsageError
from leanrl.tools.common import COLORS, clean, markdown_table, new_figure

Spans = dict[str, list[tuple[str, float, float]]]
"""part -> (what it did, from, to), in seconds from the first start"""


def read_spans(run_dir: Path, last: int) -> Spans:
    """The last iterations of a run, part by part.

    Raises:
        UsageError: there is no timeline, or it is damaged.
    """
    path = run_dir / TIMELINE_FILE
    try:
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        intervals = [
            (name, str(what), float(start), float(end))
            for line in lines[-last:]
            for name, part in dict(json.loads(line)["spans"]).items()
            for what, start, end in part
        ]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); distributed runs write it") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: damaged ({error})") from None
    if not intervals:
        raise UsageError(f"{path}: has no iteration yet")
    first = min(start for _, _, start, _ in intervals)
    merged = defaultdict(list)
    for name, what, start, end in intervals:
        merged[name].append((what, start - first, end - first))
    return dict(merged)


def shares(spans: Spans) -> list[tuple[str, str, float]]:
    """(part, what, its part of the time that is drawn), for every kind of interval."""
    whole = max(end for part in spans.values() for *_, end in part)
    rows = []
    for name, part in spans.items():
        kinds = dict.fromkeys(what for what, *_ in part)
        rows += [(name, kind, sum(end - start for what, start, end in part if what == kind) / whole) for kind in kinds]
    return rows


def draw(spans: Spans, title: str):
    """The figure: a row a part, a bar an interval; waiting is pale."""
    from matplotlib.patches import Patch

    figure = new_figure(13, 1.6 + 0.5 * len(spans))
    axes = figure.subplots()
    kinds = list(dict.fromkeys(what for part in spans.values() for what, *_ in part))
    looks = {kind: {"facecolor": color, "edgecolor": "white"} for kind, color in zip(kinds, cycle(COLORS[1:]))}
    waits = [kind for kind in kinds if kind.startswith("wait")]
    looks |= {
        kind: {**looks[kind], "facecolor": "#d8d8d8", "hatch": hatch}
        for kind, hatch in zip(waits, cycle(("///", "...", "\\\\\\")))
    }
    for row, part in enumerate(spans.values()):
        for kind in kinds:
            bars = [(start, end - start) for what, start, end in part if what == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), linewidth=0.3, **looks[kind])
    axes.set_yticks(range(len(spans)), list(spans))
    axes.set_ylim(len(spans) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left")
    clean(axes)
    patches = [Patch(label=kind, **looks[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), frameon=False)
    return figure


def render(rows: Sequence[tuple[str, str, float]]) -> str:
    """The shares as a table."""
    return markdown_table(("part", "what", "of the time"), [(name, kind, f"{part:.0%}") for name, kind, part in rows])
