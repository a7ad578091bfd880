"""leanrl.tools.ablate: rows that need no compiler, and what it refuses."""

import json
import sys
from copy import deepcopy

import pytest
import torch

from leanrl.tools import ablate, ablate_eager, ablate_off_policy, ablate_ppo, ablate_sac, ablate_td3, ablation
from leanrl.tools.common import run_tool


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs the tool with these flags: its exit code, what it printed, and its errors."""
    monkeypatch.setattr(ablation, "SAMPLE_SECONDS", 1e-9)  # one burst a sample
    num_threads = torch.get_num_threads()

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["ablate", *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            run_tool(ablate.main, ablate.Args)
        return end.value.code, *capsys.readouterr()

    yield run
    torch.set_num_threads(num_threads)


def test_two_rows_give_a_table_and_raw_timings(tool, tmp_path):
    code, out, _ = tool("--rows", "gae", "environment", "--repeats", 2, "--out", tmp_path)
    assert code == 0
    table = (tmp_path / "table.md").read_text()
    assert table in out
    assert "| trick " in table and "| GAE by a scan " in table and "| SerialVectorEnv, not SyncVectorEnv " in table

    record = json.loads((tmp_path / "ablate.json").read_text())
    assert record["machine"]["cpu_cores"] >= 1 and "leanrl.tools.ablate --rows gae" in record["command"]
    assert record["failures"] == {}
    gae, environment = record["rows"]
    assert (gae["row"], environment["row"]) == ("gae", "environment")
    assert environment["difference"] == 0.0 and 0.0 < gae["difference"] < ablation.TOLERANCE
    for line in record["rows"]:
        assert len(line["seconds_per_sample"]) == 2
        samples = [turn["with"] for turn in line["seconds_per_sample"]]
        assert line["seconds_with"] == pytest.approx(sum(samples) / 2 / line["calls_per_sample"])
    assert gae["calls_per_sample"] == 1 and environment["calls_per_sample"] == 2048
    saved = [turn["without"] - turn["with"] for turn in gae["seconds_per_sample"]]
    assert gae["seconds_saved_per_env_step"] == pytest.approx(sum(saved) / 2 / 2048)


def test_ctrl_c_keeps_what_was_measured(tool, tmp_path, monkeypatch):
    def interrupting():
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(ablate.PPO.rows, "interrupting", interrupting)
    code, out, errors = tool("--rows", "gae", "interrupting", "environment", "--repeats", 1, "--out", tmp_path)
    assert code == 130 and "interrupted: the results so far" in errors
    assert [line["row"] for line in json.loads((tmp_path / "ablate.json").read_text())["rows"]] == ["gae"]
    assert (tmp_path / "table.md").read_text() in out
    code, _, errors = tool("--rows", "interrupting", "--out", tmp_path / "nothing")
    assert code == 130 and "ablate: interrupted" in errors and not any((tmp_path / "nothing").iterdir())


def test_sides_that_differ_are_not_timed(tool, tmp_path, monkeypatch):
    def unequal():
        sides = (ablation.Side(lambda value=value: [torch.full((3,), value)], steps=1) for value in (1.0, 1.01))
        yield ablation.pair("cheating", *sides)

    monkeypatch.setitem(ablate.PPO.rows, "unequal", unequal)
    code, _, errors = tool("--rows", "unequal", "gae", "--repeats", 1, "--out", tmp_path)
    assert code == 1
    assert [line for line in errors.splitlines() if "failed" in line] == [
        "unequal: failed (cheating: the two sides compute different things, relative distance 0.01)"
    ]
    record = json.loads((tmp_path / "ablate.json").read_text())
    assert [line["row"] for line in record["rows"]] == ["gae"], "one failed row stops no other"
    assert list(record["failures"]) == ["unequal"]


def test_advice_for_eager_code(tool, tmp_path, monkeypatch):
    """The rows that need neither a compiler nor an environment, all of one group."""
    monkeypatch.setattr(ablate_eager, "NUM_STEPS", 10)
    monkeypatch.setattr(ablate_off_policy, "available_cores", lambda: 1)
    code, out, errors = tool("--rows", "eager", "--repeats", 1, "--out", tmp_path)
    assert code == 0, errors
    rows = json.loads((tmp_path / "ablate.json").read_text())["rows"]
    assert {line["group"] for line in rows} == {"eager"} and len(rows) >= 10
    assert all(line["trick"] in out for line in rows)


def test_groups_stand_for_their_rows():
    everything = ablate.expand(ablate.Args().rows)
    assert len(everything) == sum(len(group.rows) for group in ablate.GROUPS.values()), "a name is taken twice"
    assert everything["gae"] == "ppo" and everything["startup"] == "startup" and everything["sac_update"] == "sac"
    assert list(ablate.expand(["dqn", "gae", "dqn_sums"])) == ["dqn_staging", "dqn_sums", "gae"]


@pytest.mark.parametrize("rows", [ablate_td3, ablate_sac], ids=["td3", "sac"])
def test_off_policy_variants_compute_the_same(rows):
    learners = rows.reference_learner(), rows.fast_learner()
    sides = (ablate_off_policy.updating(learner, ablation.eager, num_threads=1) for learner in learners)
    num_threads = torch.get_num_threads()
    try:
        line = ablate_off_policy.same_way("eager", *sides)
    finally:
        torch.set_num_threads(num_threads)
    assert 0.0 < line.difference < ablate_off_policy.WAY_TOLERANCE


def test_samples_leave_the_parameters_as_they_were():
    side = ablate_ppo.updating(ablation.eager)
    before = deepcopy(side.touched)
    moved, _ = ablation.outcome(side)
    assert moved.abs().max() > 1e-3
    torch.testing.assert_close(side.touched, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rows", "gea"), "--rows gea: no such row; did you mean gae?"),
        (("--rows", "gae", "gae"), "--rows gae gae: needs at least one, and none twice"),
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(tool, tmp_path, flags, message):
    code, out, errors = tool(*flags, "--out", tmp_path / "out")
    assert (code, out, errors) == (2, "", f"ablate: {message}\n")
    assert not (tmp_path / "out").exists()
