"""Writes the tables of README.md and doc/ from the committed results, or checks that they match.

    python -m leanrl.tools.report             # rewrites the pages
    python -m leanrl.tools.report --check     # exit code 1 if a page differs; also lists results of older code

A table stands between two comments. The first names its data in doc/benchmarks/ (the rows of several files follow each
other) and, if the table has only some rows of the data, a field and its values in these rows:

    <!-- report: off_policy/ablate_td3.json group=td3 -->
    <!-- end -->

For learning curves, `at=500000,1000000` gives the returns at these steps instead of the final ones. For any table,
`"cell=median sps"` gives just the first row's cell in that column, for use within a sentence. `headline` instead of
data is the table at the top of the README.
"""

# What ./run.sh installs for this tool, besides the common requirements:
# requires: dev

import ast
import json
import os
import re
import shlex
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from leanrl.support.errors import UsageError
from leanrl.tools import ablate, common, compare, plan_layout, plot, profile, reproduce, speedrun
from leanrl.tools.ablate_rows import ROWS
from leanrl.tools.trials import REPOSITORY, SCRIPTS, running_mean

RESULTS = Path("doc", "benchmarks")
MARKED = re.compile(r"<!-- report: (.+?) -->((?:(?!<!--).)*?)<!-- end -->", re.DOTALL)


class Line(NamedTuple):
    """A line of the README's table and a column of its picture."""

    script: str  # the reference, which has a page and results of its name
    env_id: str
    curves: tuple[str, ...] = ("learning.csv",)


HEADLINE = {
    "PPO, HalfCheetah": Line(
        "ppo_continuous_action", "HalfCheetah-v5", ("learning_eager.csv", "learning_compiled.csv")
    ),
    "SAC, HalfCheetah": Line("sac_continuous_action", "HalfCheetah-v5"),
    "TD3, HalfCheetah": Line("td3_continuous_action", "HalfCheetah-v5"),
    "DQN, CartPole": Line("dqn", "CartPole-v1"),
    "PPO, Breakout, 8 environments": Line("ppo_atari_envpool", "Breakout-v5", ("learning_500k.csv",)),
}
COLUMNS = {"SB3": "sb3:", "SBX": "sbx:", "our eager reference": "", "fast variant, eager": "_torchcompile"}
COLUMNS |= {f"`{flags}`": f"_torchcompile {flags}" for flags in ("--compile", "--compile --amp bf16")}
"""The columns of the README's table: how labels of a peer begin, or what follows the reference's name in ours."""
OVERVIEW, SPEEDRUNS = (Path("doc", "artifacts", name) for name in ("overview.png", "speedruns.png"))

BOOKKEEPING = {"checkpoints", "cli", "errors", "evaluation", "hub", "run", "signals", "tracking"}
"""Modules of leanrl/support that do not affect speed."""


@dataclass
class Args:
    check: bool = False
    """change nothing and report what differs"""


# ------------------------------------------------------------------------------------------------------------- TABLES


def speeds_of(record: dict, script: str) -> dict[str, float]:
    """The median speed in each of COLUMNS, of a peer in its fastest setting; 0 where nothing was measured."""
    medians = {row["label"]: statistics.median(row["sps"]) for row in record["rows"]}
    return {
        column: max((sps for label, sps in medians.items() if f"{label.split(':')[0]}:" == part), default=0.0)
        if part.endswith(":")
        else medians.get(f"{script}{part}", 0.0)
        for column, part in COLUMNS.items()
    }


def headline(records: list[dict]) -> str:
    """The README's table: the median speed of each peer in its fastest setting, and of our modes."""
    speeds = [speeds_of(record, line.script) for line, record in zip(HEADLINE.values(), records, strict=True)]
    columns = [column for column in COLUMNS if any(found[column] for found in speeds)]
    lines = []
    for (name, line), found in zip(HEADLINE.items(), speeds, strict=True):
        cells = {column: common.median_speed([found[column]] if found[column] else []) for column in columns}
        best = max(found, key=found.get)
        cells[best] = f"**{cells[best]}**"
        lines.append([f"[{name}]({RESULTS}/{line.script}.md)", *cells.values()])
    return common.markdown_table(["", *columns], lines)


def overview(root: Path):
    """The README's picture: above the speeds of its table, below learning curves as long as the reference's.

    Curves are of modes with at least three seeds.
    """
    from matplotlib.patches import Patch  # 0.5 s that --help need not wait for
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = common.new_figure(12, 6)
    panels = figure.subplots(2, len(HEADLINE))
    colors = {column: next(iter(common.colors_of([part]).values())) for column, part in COLUMNS.items()}
    for (name, line), (bars, axes) in zip(HEADLINE.items(), panels.T, strict=True):
        folder = root / RESULTS / line.script
        speeds = {column: sps for column, sps in speeds_of(load(folder / "peers.json"), line.script).items() if sps}
        drawn = bars.barh(list(speeds), list(speeds.values()), color=[colors[column] for column in speeds])
        bars.bar_label(drawn, [common.median_speed([sps]) for sps in speeds.values()], padding=3)
        bars.set_title(name.removesuffix(", 8 environments"))
        bars.set(xlim=(0, 1.3 * max(speeds.values())), yticks=[], xlabel="steps per second")
        bars.invert_yaxis()
        curves = [curve for csv in line.curves for curve in plot.read_csv(folder / csv)]
        groups = {label: group for (env_id, label), group in plot.group_curves(curves).items() if env_id == line.env_id}
        end = min(curve["global_step"].iloc[-1] for curve in groups[f"{line.script}:eager"])
        for label, group in groups.items():
            if len(group) >= 3:
                band = plot.estimate_band([curve[curve["global_step"] <= end] for curve in group], "global_step")
                plot.draw_band(axes, band, common.colors_of([label])[label])
        axes.set(xlabel="environment steps", xlim=(0, 1.01 * end))  # whole rollouts end just before a million steps
        for panel in (bars, axes):
            common.clean(panel)
            panel.xaxis.set(major_locator=MaxNLocator(4, steps=[1, 2, 5, 10]), major_formatter=EngFormatter(sep=""))
    panels[1, 0].set_ylabel("return (IQM, 95 % interval)")
    handles = [Patch(color=color, label=column.strip("`")) for column, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def learning(record: dict) -> str:
    """Final returns of learning curves, or the mean returns of the last 100 episodes at the steps ``record["at"]``."""
    groups = plot.group_curves(record["curves"])
    if "at" not in record:
        return plot.finals_table(groups, with_speed=False)
    steps = [int(step) for step in record["at"].split(",")]

    def at(curves: list[plot.Curve], step: int) -> str:
        begun = [curve[curve["global_step"] <= step] for curve in curves if curve["global_step"].iloc[0] <= step]
        return common.mean_std([running_mean(part["episodic_return"], part["episodes"])[-1] for part in begun])

    rows = [[*group, *(at(curves, step) for step in steps)] for group, curves in groups.items()]
    return common.markdown_table(["environment", "group", *(f"at {step / 1e6:g}M" for step in steps)], rows)


RENDER: dict[str, Callable[[dict], str]] = {
    # The largest savings come first; start-up rows save nothing per step and keep their order.
    "ablate": lambda record: ablate.render(
        sorted(record["rows"], key=lambda row: row["seconds_saved_per_env_step"] or 0.0, reverse=True)
    ),
    "compare": lambda record: compare.render_table(record["rows"], record["sweep"]),
    "profile": profile.render,
    "plan_layout": lambda record: plan_layout.render(
        [plan_layout.Prediction(**prediction) for prediction in record["predictions"]], record["measured"]
    ),
    "plot": learning,
    "reproduce": lambda record: reproduce.render(record["rows"], SimpleNamespace(**record["args"])),
    "speedrun": speedrun.render_table,
}
"""Functions that turn a record into text with tables, by the tool that wrote it."""


def load(path: Path) -> dict:
    """Results: a CSV's curves, or a record, with the tool that wrote it (for some, only the file's name says which)."""
    if path.suffix == ".csv":
        return {"tool": "plot", "curves": plot.read_csv(path)}
    return {"tool": path.stem, **json.loads(path.read_text())}


def render(marker: str, root: Path, page: Path) -> tuple[str, dict[str, dict]]:
    """The text below a marker, and its records by their names in RESULTS.

    Raises:
        UsageError: there are no such results, or they are not of a tool in RENDER.
    """
    words = shlex.split(marker)
    names = [word for word in words if "=" not in word]
    is_headline = names == ["headline"]
    if is_headline:
        names = [f"{line.script}/peers.json" for line in HEADLINE.values()]
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    column = fields.pop("cell", None)
    try:
        by_name = {name: load(root / RESULTS / name) for name in names}
        records = list(by_name.values())
        text = headline(records) if is_headline else RENDER[records[0]["tool"]](selected(records, fields))
        tables = [block for block in text.split("\n\n") if block.startswith("|")]
        if column is not None:
            header, _, first, *_ = ([cell.strip() for cell in line.split("|")] for line in tables[0].splitlines())
            return first[header.index(column)], by_name
        commits = dict.fromkeys(short(commit) for record in records for commit in commits_of(record))
        source = f"Measured at {', '.join(commits)}" if commits else "Raw curves"
        if not is_headline:
            links = (f"[{Path(name).name}]({os.path.relpath(root / RESULTS / name, page.parent)})" for name in names)
            machines = {machine_of(record) for record in records}
            source = f"{source}{machines.pop() if len(machines) == 1 else ''}: {', '.join(links)}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{page}: report: {marker}: {type(error).__name__}: {error}") from None
    text = "\n\n".join([*tables, source])
    return f"\n{text}.\n", by_name


def machine_of(record: dict) -> str:
    """`` on a machine``, if the record has it."""
    machine = record.get("machine", "")
    return f" on {machine if isinstance(machine, str) else common.describe_machine(machine)}" if machine else ""


def selected(records: list[dict], fields: dict[str, str]) -> dict:
    """The first record, with the curves, runs and rows of all; only rows whose ``field`` is one of ``value,value``."""
    joined = {key: [x for record in records for x in record.get(key, [])] for key in ("rows", "curves", "runs")}
    if joined["curves"]:
        return {**joined, **fields}
    chosen = [row for row in joined["rows"] if all(row[key] in of.split(",") for key, of in fields.items())]
    return records[0] | joined | {"rows": chosen}


# ------------------------------------------------------------------------------------------------------------ COMMITS


def commits_of(record: dict) -> list[str]:
    """The commits of a record's runs, or of the tool itself; for curves none is known."""
    runs = [run["args"]["git_commit"] for run in record.get("runs", []) if run.get("args")]
    known = [record.get("git_commit"), record.get("machine", {}).get("git_commit")]
    return list(dict.fromkeys(filter(None, runs or known)))


def short(commit: str) -> str:
    """``2267488``, plus ``-dirty`` if the commit has that ending: there were uncommitted changes."""
    return commit[:7] + "-dirty" * commit.endswith("-dirty")


def git(*words: str) -> str | None:
    """What git prints; None if it fails."""
    call = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True)
    return call.stdout if call.returncode == 0 else None


@cache
def code_at(commit: str, path: str) -> str | None:
    """A file at a commit, without comments, docstrings and layout; None if it did not exist."""
    if (text := git("show", f"{commit}:{path}")) is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


@cache
def files_behind(script: str) -> set[str]:
    """The files that affect a script's speed: itself and its imports, except BOOKKEEPING."""
    finder = ModuleFinder([str(REPOSITORY)], excludes=[f"leanrl.support.{name}" for name in BOOKKEEPING])
    finder.run_script(str(SCRIPTS / f"{script}.py"))
    files = filter(None, (module.__file__ for module in finder.modules.values()))
    return {str(Path(file).relative_to(REPOSITORY)) for file in files}


def changed_since(record: dict) -> list[str]:
    """The files behind a record whose code has changed since it was measured; none if git does not know the commit."""
    commit = commits_of(record)[-1].removesuffix("-dirty")
    words = set(re.findall(r"\w+", json.dumps(record)))
    groups = {row.get("group") for row in record.get("rows", [])}
    scripts = {path.stem for path in SCRIPTS.glob("[!_]*.py")} & (words | {r.script for r in ROWS if r.group in groups})
    if git("cat-file", "-e", commit) is None:
        return []
    files = set().union(*map(files_behind, scripts))
    return sorted(file for file in files if code_at(commit, file) != code_at("HEAD", file))


# --------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args, root: Path = REPOSITORY) -> int:
    """Returns 1 if ``--check`` found a difference, else 0; ``root`` has the pages and the results."""
    differences, used, tabled = [], {}, {}
    for page in [root / "README.md", *sorted((root / "doc").rglob("*.md"))]:
        text = page.read_text()
        tables = MARKED.findall(text)
        if len(tables) != text.count("<!-- report: "):
            raise UsageError(f"{page}: a report without its <!-- end -->")
        for marker, before in tables:
            now, records = render(marker, root, page)
            used |= records
            tabled |= {} if "cell=" in marker else records
            if now != before:
                differences.append(f"{page.relative_to(root)}: {marker}")
                text = text.replace(f"{marker} -->{before}<!-- end -->", f"{marker} -->{now}<!-- end -->")
        if not args.check:
            page.write_text(text)
            if "report: headline" in text:
                overview(root).savefig(root / OVERVIEW, dpi=110)
    # Cold caches would double the panels, and add seconds to curves of minutes.
    speedruns = [record for record in tabled.values() if record["tool"] == "speedrun"]
    warm = [record | {"runs": [run for run in record["runs"] if run["cache"] == "warm"]} for record in speedruns]
    if warm and not args.check:
        speedrun.draw(*warm).savefig(root / SPEEDRUNS, dpi=100)
    for name, record in used.items() if args.check else ():
        if commits_of(record) and (files := changed_since(record)):
            changed = ", ".join(sorted({Path(file).stem for file in files}))
            print(f"{name}: measured at {short(commits_of(record)[-1])}; changed since: {changed}")
    for difference in differences:
        print(f"{difference}: {'differs from its data' if args.check else 'rewritten'}")
    return 1 if args.check and differences else 0


if __name__ == "__main__":
    common.run_tool(main, Args)
