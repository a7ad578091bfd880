"""Writes the tables of README.md and doc/ from the committed results, or checks that they are what those say.

    python -m leanrl.tools.report             # rewrites the pages
    python -m leanrl.tools.report --check     # exit code 1 where a page differs; also lists what is of older code

A table stands between two comments. The first names its data in doc/benchmarks/ (of several files the rows follow each
other), and, where the table has not all rows of the data, the values of a field that it has:

    <!-- report: off_policy/ablate_td3.json group=td3 -->
    <!-- end -->

Of learning curves `at=500000,1000000` gives the returns at these steps instead of the final ones, and of any table
`"cell=median sps"` the first row's cell in that column, alone, within a sentence. `headline` instead of data is the
table on top of the README.
"""

# What ./run.sh installs for it, beside what everything needs:
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

import numpy as np

from leanrl.support.errors import UsageError
from leanrl.tools import ablate, compare, plan_layout, plot, profile, reproduce, speedrun
from leanrl.tools.ablate_rows import ROWS
from leanrl.tools.common import describe_machine, markdown_table, run_tool
from leanrl.tools.trials import REPOSITORY, SCRIPTS, running_mean

RESULTS = Path("doc", "benchmarks")
MARKED = re.compile(r"<!-- report: (.+?) -->((?:(?!<!--).)*?)<!-- end -->", re.DOTALL)

HEADLINE = {
    "PPO, HalfCheetah": "ppo_continuous_action",
    "SAC, HalfCheetah": "sac_continuous_action",
    "TD3, HalfCheetah": "td3_continuous_action",
    "DQN, CartPole": "dqn",
    "PPO, Breakout, 8 environments": "ppo_atari_envpool",
}
"""The lines of the README's table: what they are about, and the reference, which has a page and results of its name."""

BOOKKEEPING = {"checkpoints", "cli", "errors", "evaluation", "hub", "run", "signals", "tracking"}
"""Modules of leanrl/support that decide no speed."""


@dataclass
class Args:
    check: bool = False
    """change nothing, and tell what differs"""


# ------------------------------------------------------------------------------------------------------------- TABLES


def headline(records: list[dict]) -> str:
    """The README's table: the median speed of each peer in its fastest setting, and of our modes."""
    lines = []
    for (name, script), record in zip(HEADLINE.items(), records, strict=True):
        speeds = {row["label"]: statistics.median(row["sps"]) for row in record["rows"]}
        peers = [[sps for label, sps in speeds.items() if label.startswith(peer)] for peer in ("sb3:", "sbx:")]
        fast = f"{script}_torchcompile"
        ours = [script, fast, f"{fast} --compile", f"{fast} --compile --amp bf16"]
        found = [*(max(settings, default=0.0) for settings in peers), *(speeds.get(label, 0.0) for label in ours)]
        cells = [f"**{sps:,.0f}**" if sps == max(found) else f"{sps:,.0f}" if sps else "-" for sps in found]
        lines.append([f"[{name}]({RESULTS}/{script}.md)", *cells])
    header = ["", "SB3", "SBX", "our eager reference", "fast variant, eager", "`--compile`", "`--compile --amp bf16`"]
    return markdown_table(header, lines)


def learning(record: dict) -> str:
    """Final returns of learning curves, or the mean returns of the last 100 episodes at the steps ``record["at"]``."""
    groups = plot.group_curves(record["curves"])
    if "at" not in record:
        return plot.finals_table(groups, with_speed=False)
    steps = [int(step) for step in record["at"].split(",")]

    def at(curve: plot.Curve, step: int) -> float:
        return running_mean(curve["episodic_return"], curve["episodes"])[(curve["global_step"] <= step).sum() - 1]

    rows = [
        [*group, *(f"{statistics.fmean(at(curve, step) for curve in curves):,.1f}" for step in steps)]
        for group, curves in groups.items()
    ]
    return markdown_table(["environment", "group", *(f"at {step / 1e6:g}M" for step in steps)], rows)


def compile_times(record: dict) -> str:
    """Seconds of warm-up in each round, from an empty cache of TorchInductor and from a full one."""
    seconds: dict[str, dict[str, list[str]]] = {}
    for run in record["runs"]:
        summary = run["summary"]
        label = f"{summary['script']} --compile" + " --amp bf16" * (summary.get("amp") == "bf16")
        found = seconds.setdefault(label, {"cold": [], "warm": []})[run["cache"]]
        found.append(f"{summary['warmup_seconds']:.1f}")
    rows = [[label, *map(" ".join, found.values())] for label, found in seconds.items()]
    return markdown_table(("program", "cold cache, seconds", "warm cache, seconds"), rows)


def pairs(record: dict) -> str:
    """Speeds before and after, and the median of the ratios within pairs, with its 95 % bootstrap interval."""
    rows = []
    for runs in record.values():
        if isinstance(runs, dict) and "pairs" in runs:
            before, after = ([pair[side]["sps"] for pair in runs["pairs"]] for side in ("before", "after"))
            ratios = np.divide(after, before)
            resamples = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
            low, high = np.percentile(np.median(resamples, 1), (2.5, 97.5))
            speeds = [f"{statistics.median(speeds):,.0f}" for speeds in (before, after)]
            ratio = f"{np.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
            rows.append([" ".join([runs["script"], *runs["flags"]]), f"{len(ratios)}", *speeds, ratio])
    return markdown_table(("program", "pairs", "steps/s before", "after", "after / before [95 % interval]"), rows)


RENDER: dict[str, Callable[[dict], str]] = {
    # What saves most comes first; start-up saves nothing per step, and keeps its order.
    "ablate": lambda record: ablate.render(
        sorted(record["rows"], key=lambda row: row["seconds_saved_per_env_step"] or 0.0, reverse=True)
    ),
    "compare": lambda record: compare.render_table(record["rows"], record["sweep"]),
    "compile_time": compile_times,
    "pairs": pairs,
    **dict.fromkeys(("parts", "parts_atari", "profile"), profile.render),  # the first two are its former names
    "plan_layout": lambda record: plan_layout.render(
        [plan_layout.Prediction(**prediction) for prediction in record["predictions"]], record["measured"]
    ),
    "plot": learning,
    "reproduce": lambda record: reproduce.render(record["rows"], SimpleNamespace(**record["args"])),
    "speedrun": speedrun.render_table,
}
"""What makes text with tables of a record, by the tool that wrote it."""


def load(path: Path) -> dict:
    """Results: the curves of a CSV, or a record, with the tool that wrote it; some are named after that instead."""
    if path.suffix == ".csv":
        return {"tool": "plot", "curves": plot.read_csv(path)}
    return {"tool": path.stem, **json.loads(path.read_text())}


def render(marker: str, root: Path, page: Path) -> tuple[str, dict[str, dict]]:
    """What stands below a marker, and the records that it is made of by their names in RESULTS.

    Raises:
        UsageError: there are no such results, or not of a tool in RENDER.
    """
    words = shlex.split(marker)
    names = [word for word in words if "=" not in word]
    if names == ["headline"]:
        names = [f"{script}/peers.json" for script in HEADLINE.values()]
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    column = fields.pop("cell", None)
    try:
        records = [load(root / RESULTS / name) for name in names]
        is_headline = words == ["headline"]
        text = headline(records) if is_headline else RENDER[records[0]["tool"]](selected(records, fields))
        tables = [block for block in text.split("\n\n") if block.startswith("|")]
        if column is not None:
            header, _, first, *_ = ([cell.strip() for cell in line.split("|")] for line in tables[0].splitlines())
            return first[header.index(column)], {}
        commits = dict.fromkeys(short(commit) for record in records for commit in commits_of(record))
        source = f"Measured at {', '.join(commits)}" if commits else "Raw curves"
        if not is_headline:
            links = (f"[{Path(name).name}]({os.path.relpath(root / RESULTS / name, page.parent)})" for name in names)
            source = f"{source}{machine_of(records[0])}: {', '.join(links)}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{page}: report: {marker}: {type(error).__name__}: {error}") from None
    text = "\n\n".join([*tables, source])
    return f"\n{text}.\n", dict(zip(names, records, strict=True))


def machine_of(record: dict) -> str:
    """`` on a machine``, where the record tells of it."""
    machine = record.get("machine", "")
    return f" on {machine if isinstance(machine, str) else describe_machine(machine)}" if machine else ""


def selected(records: list[dict], fields: dict[str, str]) -> dict:
    """The first record, with the curves of all and the rows of all whose ``field`` is one of ``value,value``."""
    rows = [row for record in records for row in record.get("rows", [])]
    curves = [curve for record in records for curve in record.get("curves", [])]
    if curves:
        return {"curves": curves, **fields}
    chosen = [row for row in rows if all(row[key] in of.split(",") for key, of in fields.items())]
    return records[0] | {"rows": chosen}


# ------------------------------------------------------------------------------------------------------------ COMMITS


def commits_of(record: dict) -> list[str]:
    """The commits that a record's runs were of, or the tool itself; of curves none is known."""
    if record["tool"] == "pairs":
        return [record["before"], *dict.fromkeys(runs["after"] for runs in record.values() if isinstance(runs, dict))]
    runs = [run["args"]["git_commit"] for run in record.get("runs", []) if run.get("args")]
    known = [record.get("git_commit"), record.get("machine", {}).get("git_commit")]
    return list(dict.fromkeys(runs or filter(None, known)))


def short(commit: str) -> str:
    """``2267488``, with ``-dirty`` where it ended so: files differed from what was committed."""
    return commit[:7] + "-dirty" * commit.endswith("-dirty")


def git(*words: str) -> str | None:
    """What git prints; None where it fails."""
    call = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True)
    return call.stdout if call.returncode == 0 else None


@cache
def code_at(commit: str, path: str) -> str | None:
    """A file at a commit without comments, docstrings and layout; None where it was not there."""
    if (text := git("show", f"{commit}:{path}")) is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


@cache
def files_behind(script: str) -> set[str]:
    """The files that decide a script's speed: itself, and what it imports, but for BOOKKEEPING."""
    finder = ModuleFinder([str(REPOSITORY)], excludes=[f"leanrl.support.{name}" for name in BOOKKEEPING])
    finder.run_script(str(SCRIPTS / f"{script}.py"))
    files = filter(None, (module.__file__ for module in finder.modules.values()))
    return {str(Path(file).relative_to(REPOSITORY)) for file in files}


def changed_since(record: dict) -> list[str]:
    """The files behind a record whose code is not what it was when that was measured; none where git knows nothing."""
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
    """1 if ``--check`` has found a difference, else 0; ``root`` has the pages and the results."""
    differences, used = [], {}
    for page in [root / "README.md", *sorted((root / "doc").rglob("*.md"))]:
        text = page.read_text()
        tables = MARKED.findall(text)
        if len(tables) != text.count("<!-- report: "):
            raise UsageError(f"{page}: a report without its <!-- end -->")
        for marker, before in tables:
            now, records = render(marker, root, page)
            used |= records
            if now != before:
                differences.append(f"{page.relative_to(root)}: {marker}")
                text = text.replace(f"{marker} -->{before}<!-- end -->", f"{marker} -->{now}<!-- end -->")
        if not args.check:
            page.write_text(text)
    for name, record in used.items() if args.check else ():
        if commits_of(record) and (files := changed_since(record)):
            changed = ", ".join(sorted({Path(file).stem for file in files}))
            print(f"{name}: measured at {short(commits_of(record)[-1])}; changed since: {changed}")
    for difference in differences:
        print(f"{difference}: {'differs from its data' if args.check else 'rewritten'}")
    return 1 if args.check and differences else 0


if __name__ == "__main__":
    run_tool(main, Args)
