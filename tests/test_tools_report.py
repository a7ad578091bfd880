"""leanrl.tools.report: the documents' tables are what the committed results say."""

import json
import shutil

import pytest
from scripts import run_tool_in_process

from leanrl.support.errors import UsageError
from leanrl.tools import report
from leanrl.tools.trials import REPOSITORY

DATA = "dqn/peers.json"


def test_pages_are_their_data(monkeypatch, capsys):
    assert run_tool_in_process(monkeypatch, report, "--check") == 0, capsys.readouterr().out


@pytest.fixture
def root(tmp_path):
    """A repository of a page and its data."""
    data = tmp_path / report.RESULTS / DATA
    data.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / report.RESULTS / DATA, data)
    (tmp_path / "README.md").write_text("Nothing measured.\n")
    return tmp_path


def test_a_page_is_rewritten(root, capsys):
    marker = f"{DATA} label=dqn,dqn_torchcompile"
    page, data = root / "doc" / "page.md", root / report.RESULTS / DATA
    page.write_text(f"before\n<!-- report: {marker} -->\nold\n<!-- end -->\nafter\n")
    assert report.main(report.Args(check=True), root) == 1
    assert f"doc/page.md: {marker}: differs" in capsys.readouterr().out and "\nold\n" in page.read_text()
    assert report.main(report.Args(), root) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- report") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| dqn")] == [
        "dqn",
        "dqn_torchcompile",
    ]
    assert "\nMeasured at 83079b7 on Intel" in text and "[peers.json](benchmarks/dqn/peers.json).\n<!-- end" in text
    assert report.main(report.Args(check=True), root) == 0
    record = json.loads(data.read_text())
    record["rows"][1]["sps"][0] += 1
    data.write_text(json.dumps(record))
    assert report.main(report.Args(check=True), root) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("<!-- report: dqn/nothing.json -->\n<!-- end -->\n", "dqn/nothing.json: FileNotFoundError"),
        (f"<!-- report: {DATA} group=td3 -->\n<!-- end -->\n", "group=td3: KeyError: 'group'"),
        (f"<!-- report: {DATA} -->\n<!-- report: {DATA} -->\n<!-- end -->\n", "without its <!-- end -->"),
    ],
)
def test_bad_markers(root, text, said):
    (root / "README.md").write_text(text)
    with pytest.raises(UsageError, match=f"README.md: .*{said}"):
        report.main(report.Args(), root)


def test_older_code_is_found(monkeypatch):
    record = json.loads((REPOSITORY / report.RESULTS / DATA).read_text())
    names = {path.removeprefix(f"{REPOSITORY}/leanrl/") for path in report.code_behind(record)}
    assert {"dqn.py", "dqn_torchcompile.py", "support/replay.py"} <= names and "sac_continuous_action.py" not in names

    monkeypatch.setattr(report, "code_behind", lambda _: ["README.md"])
    git = report.subprocess.run
    head = git(["git", "-C", REPOSITORY, "log", "-1", "--format=%H"], capture_output=True, text=True).stdout.strip()
    if not head:
        pytest.skip("no git here")
    last = git(["git", "-C", REPOSITORY, "log", "-1", "--format=%H", "--", "README.md"], capture_output=True, text=True)
    before = f"{last.stdout.strip()}~1"
    for commit, changed in ((head, False), (before, True)):
        monkeypatch.setattr(report, "commits_of", lambda _, commit=commit: [commit])
        assert bool(report.later_changes(record)) == changed
