"""leanrl.tools.ablate: both sides of a row learn the same, what the tool writes, has written, and refuses."""

import json
import sys
from functools import partial

import pytest
import torch
from scripts import cells, newest_checkpoint, run_tool_in_process, tiny
from torch.utils._pytree import tree_leaves

from leanrl.support import executables
from leanrl.tools import ablate, ablate_rows
from leanrl.tools.ablate_rows import ROWS, Row
from leanrl.tools.trials import REPOSITORY, Contender, require_valid

NETWORKS = ("agent", "actor", "critics", "q_network")
# A row for each patch of our code; TorchInductor's options change nothing where nothing is compiled.
PATCHED = [row for row in ROWS if row.changes and not hasattr(row.changes[0], "in_dict")]


@pytest.mark.parametrize("row", PATCHED, ids=lambda row: f"{row.group} {row.name}")
def test_both_sides_learn_the_same(row, tmp_path, monkeypatch):
    """Uncompiled."""
    monkeypatch.setattr(executables, "CompiledStep", lambda fn, device: fn)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    backend = ["--env-backend=envpool"] if "envpool" in row.flags else []
    num_threads, products = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    learned = []
    for side in ("with", "without"):
        flags = [*tiny(row.script), *backend, "--compile", "--total-timesteps=256", f"--runs-dir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", ["ablate_rows", *flags, f"--run-name={side}"])
        ablate_rows.run(row, side)
        _, state = newest_checkpoint(tmp_path / side)
        networks = [part for name, part in state["script"].items() if name in NETWORKS]
        learned.append(torch.cat([x.flatten() for x in tree_leaves(networks)]))
    torch.set_num_threads(num_threads)
    torch.backends.mkldnn.matmul.fp32_precision = products
    ours, theirs = learned
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group} {row.name}")
def test_scripts_take_the_flags(row):
    for side in ("with", "without"):
        words = row.command(side)
        assert words[3:5] == [str(ROWS.index(row)), side]
        require_valid(Contender(side, (sys.executable, f"{row.script}.py", *words[5:])))
    assert row.command("with")[5:] != row.command("without")[5:] or row.changes


def test_two_real_runs_give_a_table(monkeypatch, capsys, tmp_path):
    command = Row.command
    short = ["--no-compile", "--learning-starts=150", "--total-timesteps=250"]
    monkeypatch.setattr(Row, "command", lambda row, side: [*command(row, side), *short])
    assert run_tool_in_process(monkeypatch, ablate, "--rows", "dqn_sums", "--repeats", 1, "--out", tmp_path) == 0
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out and [row[0] for row in cells(table)] == ["greedy action as sums"]
    record = json.loads((tmp_path / "ablate.json").read_text())
    assert record["machine"]["cpu_cores"] >= 1 and " --rows dqn_sums" in record["command"] and not record["failures"]
    (line,) = record["rows"]
    (turn,) = line["seconds_per_sample"]
    assert 1e-6 < turn["with"] < 0.1 and line["gain"] == pytest.approx(turn["without"] / turn["with"])
    assert line["seconds_saved_per_env_step"] == pytest.approx(turn["without"] - turn["with"])


def test_what_fails_is_told_and_ctrl_c_keeps_what_was_measured(monkeypatch, capsys, tmp_path):
    def seconds_of(row, side, seed):
        if row.name == "td3_bf16":
            raise KeyboardInterrupt
        if row.name == "gae":
            raise RuntimeError("exit 1\nno GAE")
        return 2.0 * seed if side.label == "without" else 0.5

    monkeypatch.setattr(ablate, "seconds_of", seconds_of)
    call = partial(run_tool_in_process, monkeypatch, ablate, "--out", tmp_path)
    assert call("--rows", "gae", "sums", "--repeats", 3) == 1
    assert "gae: GAE by a scan: failed\nexit 1\nno GAE" in capsys.readouterr().err
    row = ["policy as sums", "4,000,000", "500,000", "8.00x", "4.00 to 12.00", "3,500,000"]
    assert cells((tmp_path / "table.md").read_text()) == [row]
    assert call("--rows", "startup", "td3_bf16") == 130
    assert "interrupted: these are the results of the runs so far" in capsys.readouterr().err
    record = json.loads((tmp_path / "ablate.json").read_text())
    assert {line["row"] for line in record["rows"]} == {"startup", "collector"}


def test_groups_stand_for_their_rows(monkeypatch):
    assert "td3_bf16" in {row.name for row in ablate.expand(["td3_bf16"])}
    for units in (True, False):
        monkeypatch.setattr(ablate, "has_bf16_units", lambda units=units: units)
        assert ablate.expand(ablate.Args().rows) == [row for row in ROWS if units or "bf16" not in row.trick]
    assert [row.name for row in ablate.expand(["dqn", "sums", "dqn_sums"])] == ["sums", "dqn_update", "dqn_sums"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rows", "gea"), "--rows gea: no such row; did you mean gae?"),
        (("--rows", "gae", "gae"), "--rows gae gae: needs at least one value, and none repeated"),
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(refusal, tmp_path, flags, message):
    assert refusal(ablate, *flags, "--out", tmp_path / "out") == f"ablate: {message}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "doc").rglob("ablate*.json")), ids=lambda path: path.stem)
def test_what_was_recorded_before_still_renders(path):
    """As on the pages (tests/test_tools_report.py), and with rows that are no more."""
    rows = json.loads(path.read_text())["rows"]
    lines = [line for line in ablate.render(rows).splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 2 * len({row["group"] for row in rows})
    assert all(any(f" {row['trick']} " in line for line in lines) for row in rows)
