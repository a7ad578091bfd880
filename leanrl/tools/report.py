"""Writes the tables of README.md and doc/ from the committed results, or checks that they are what those say.

    python -m leanrl.tools.report             # rewrites the pages
    python -m leanrl.tools.report --check     # exit code 1 where a page differs; also lists what is of older code

A table stands between two comments. The first names its data in doc/benchmarks/ (of several files the rows follow each
other), and, where the table has not all rows of the data, the values of a field that it has:

    <!-- report: off_policy/ablate_td3.json group=td3 -->
    <!-- end -->

`headline` instead of data is the table on top of the README.
"""

import json
import os
import re
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from modulefinder import ModuleFinder
from pathlib import Path
from types import SimpleNamespace

from leanrl.support.errors import UsageError
from leanrl.tools import ablate, compare, plan_layout, profile, reproduce
from leanrl.tools.common import describe_machine, markdown_table, run_tool
from leanrl.tools.peers import PEERS
from leanrl.tools.trials import REPOSITORY, SCRIPTS

RESULTS = Path("doc", "benchmarks")
MARKED = re.compile(r"<!-- report: (.+?) -->\n((?:(?!<!--).)*?)<!-- end -->", re.DOTALL)

RENDER: dict[str, Callable[[dict], str]] = {
    "ablate": lambda record: ablate.render(record["rows"]),
    "compare": lambda record: compare.render_table(record["rows"], record["sweep"]),
    **dict.fromkeys(("parts", "parts_atari", "profile"), profile.render),  # the first two are its former names
    "plan_layout": lambda record: plan_layout.render(
        [plan_layout.Prediction(**prediction) for prediction in record["predictions"]], record["measured"]
    ),
    "reproduce": lambda record: reproduce.render(record["rows"], SimpleNamespace(**record["args"])),
}
"""What makes text with tables of a record, by the tool that wrote it."""

HEADLINE = {
    "PPO, HalfCheetah": "ppo_continuous_action",
    "SAC, HalfCheetah": "sac_continuous_action",
    "TD3, HalfCheetah": "td3_continuous_action",
    "DQN, CartPole": "dqn",
    "PPO, Breakout, 8 environments": "ppo_atari_envpool",
}
"""The lines of the README's table: what they are about, and the reference, which has a page and results of its name."""


@dataclass
class Args:
    check: bool = False
    """change nothing, and tell what differs"""


# ------------------------------------------------------------------------------------------------------------- TABLES


def render(marker: str, root: Path, page: Path) -> tuple[str, dict[str, dict]]:
    """What stands below a marker, and the records that it is made of by their names in RESULTS.

    Raises:
        UsageError: there are no such results, or not of a tool in RENDER.
    """
    words = marker.split()
    names = [word for word in words if "=" not in word]
    if names == ["headline"]:
        names = [f"{script}/peers.json" for script in HEADLINE.values()]
    try:
        records = [json.loads((root / RESULTS / name).read_text()) for name in names]
        if words == ["headline"]:
            text, sources = headline(records), ""
        else:
            text = RENDER[records[0]["tool"]](selected(records, [word.split("=") for word in words if "=" in word]))
            links = (f"[{Path(name).name}]({os.path.relpath(root / RESULTS / name, page.parent)})" for name in names)
            sources = f" on {describe_machine(records[0]['machine'])}: {', '.join(links)}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{page}: report: {marker}: {type(error).__name__}: {error}") from None
    tables = "\n\n".join(block for block in text.split("\n\n") if block.startswith("|"))
    commits = dict.fromkeys(short(commit) for record in records for commit in commits_of(record))
    return f"{tables}\n\nMeasured at {', '.join(commits)}{sources}.\n", dict(zip(names, records, strict=True))


def selected(records: list[dict], fields: list[list[str]]) -> dict:
    """The first record, with the rows of all whose ``field`` is one of ``value,value``."""
    rows = [row for record in records for row in record.get("rows", [])]
    return records[0] | {"rows": [row for row in rows if all(row[key] in of.split(",") for key, of in fields)]}


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


# ------------------------------------------------------------------------------------------------------------ COMMITS


def commits_of(record: dict) -> list[str]:
    """The commits that a record's runs were of, or the tool itself."""
    runs = [run["args"]["git_commit"] for run in record.get("runs", []) if run["args"]]
    return list(dict.fromkeys(runs or [record["machine"]["git_commit"]]))


def short(commit: str) -> str:
    """``2267488``, with ``-dirty`` where it ended so: files differed from what was committed."""
    return commit[:7] + "-dirty" * commit.endswith("-dirty")


def code_behind(record: dict) -> list[str]:
    """The files that decide what was measured: the scripts that were run, or the tool, and what they import."""
    labels = [row.get("label") or row.get("who") or row.get("script") for row in record.get("rows", [])]
    names = {label.partition(" ")[0] for label in labels if label}
    scripts = [SCRIPTS / f"{PEERS[name].script if name in PEERS else name}.py" for name in sorted(names)]
    files = set()
    for script in filter(Path.exists, scripts or [SCRIPTS / "tools" / f"{record['tool']}.py"]):
        finder = ModuleFinder([str(REPOSITORY)])
        finder.run_script(str(script))
        files |= {module.__file__ for module in finder.modules.values() if module.__file__}
    return sorted(files)


def later_changes(record: dict) -> list[str]:
    """The commits since a record's that changed the code behind it, the last first; none where git knows nothing."""
    git = ["git", "-C", str(REPOSITORY), "log", "--format=%h"]
    since = f"{commits_of(record)[0].removesuffix('-dirty')}..HEAD"
    return subprocess.run([*git, since, "--", *code_behind(record)], capture_output=True, text=True).stdout.split()


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
                text = text.replace(f"{marker} -->\n{before}<!-- end -->", f"{marker} -->\n{now}<!-- end -->")
        if not args.check:
            page.write_text(text)
    if args.check:
        for name, record in used.items():
            if changes := later_changes(record):
                commit, count = short(commits_of(record)[0]), len(changes)
                print(f"{name}: measured at {commit}; {count} commits changed its code since, the last {changes[0]}")
    for difference in differences:
        print(f"{difference}: {'differs from its data' if args.check else 'rewritten'}")
    return 1 if args.check and differences else 0


if __name__ == "__main__":
    run_tool(main, Args)
