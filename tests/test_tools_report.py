"""leanrl.tools.report: the documents' tables are what the committed results say."""

import json
import shutil

import pytest
from scripts import cells, run_tool_in_process

from leanrl.support.errors import UsageError
from leanrl.tools import plot, report
from leanrl.tools.trials import REPOSITORY

DATA = "dqn/peers.json"


def test_pages_are_their_data(monkeypatch, capsys):
    assert run_tool_in_process(monkeypatch, report, "--check") == 0, capsys.readouterr().out


def test_overview(monkeypatch):
    """The speeds of the README's table, and at least two curves for each algorithm."""
    monkeypatch.setattr(plot, "REPS", 10)
    panels = report.overview(REPOSITORY).axes
    table = cells(report.render("headline", REPOSITORY, REPOSITORY / "README.md")[0])
    for bars, axes, (_, *speeds) in zip(panels[:5], panels[5:], table, strict=True):
        assert [bar.get_text() for bar in bars.texts] == [speed.strip("*") for speed in speeds if speed != "-"]
        assert len(axes.lines) >= 2


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
    labels = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| dqn")]
    assert labels == ["dqn", "dqn_torchcompile"]
    record = json.loads(data.read_text())
    commit, processor = record["machine"]["git_commit"][:7], record["machine"]["device_name"]
    assert f"\nMeasured at {commit} on {processor}" in text
    assert "[peers.json](benchmarks/dqn/peers.json).\n<!-- end" in text
    assert report.main(report.Args(check=True), root) == 0
    next(row for row in record["rows"] if row["label"] == "dqn")["sps"][0] += 1
    data.write_text(json.dumps(record))
    assert report.main(report.Args(check=True), root) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("<!-- report: dqn/nothing.json -->\n<!-- end -->\n", "dqn/nothing.json: FileNotFoundError"),
        (f"<!-- report: {DATA} group=td3 -->\n<!-- end -->\n", "group=td3: KeyError: 'group'"),
        (f'<!-- report: {DATA} "cell=no column" --><!-- end -->\n', "ValueError: 'no column' is not in list"),
        (f"<!-- report: {DATA} -->\n<!-- report: {DATA} -->\n<!-- end -->\n", "without its <!-- end -->"),
    ],
)
def test_bad_markers(root, text, said):
    (root / "README.md").write_text(text)
    with pytest.raises(UsageError, match=f"README.md: .*{said}"):
        report.main(report.Args(), root)


def test_older_code_is_found(monkeypatch):
    record = report.load(REPOSITORY / report.RESULTS / DATA)
    behind = report.files_behind("dqn") | report.files_behind("dqn_torchcompile")
    names = {path.removeprefix("leanrl/") for path in behind}
    assert {"dqn.py", "dqn_torchcompile.py", "support/replay.py"} <= names
    assert not {"sac_continuous_action.py", "support/tracking.py"} & names

    before = {
        "leanrl/dqn.py": '"""Before."""\nx = 1\n\n\ndef f():\n    """Says."""\n    return x  # y\n',
        "leanrl/support/replay.py": "x = 1\n",
    }
    after = {"leanrl/dqn.py": '"""After."""\nx = 1\ndef f():\n    return (x)\n', "leanrl/support/replay.py": "x = 2\n"}
    files = {"HEAD": after, report.commits_of(record)[-1]: before}

    def git(command: str, words: str, *more: str) -> str | None:
        commit, _, path = (more[0] if command == "cat-file" else words).partition(":")
        return files.get(commit, {}).get(path, "" if commit in files else None)

    monkeypatch.setattr(report, "git", git)
    report.code_at.cache_clear()
    assert report.changed_since(record) == ["leanrl/support/replay.py"]
    del files[report.commits_of(record)[-1]]  # as in a copy without its history
    assert report.changed_since(record) == []
    report.code_at.cache_clear()


def test_a_cell_within_a_sentence(root):
    page = root / "doc" / "page.md"
    page.write_text(f'It makes <!-- report: {DATA} label=dqn "cell=median sps" --><!-- end --> steps.\n')
    assert report.main(report.Args(), root) == 0
    speeds = next(row["sps"] for row in report.load(root / report.RESULTS / DATA)["rows"] if row["label"] == "dqn")
    assert f"-->{float(f'{sorted(speeds)[1]:.3g}'):,.0f}<!-- end --> steps.\n" in page.read_text()
