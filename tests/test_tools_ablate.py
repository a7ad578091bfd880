"""leanrl.tools.ablate: its rows, without a compiler, what it writes and refuses, and what it wrote before."""

import importlib
import json
from copy import deepcopy

import pytest
import torch
import tyro
from scripts import cells, run_tool_in_process

import leanrl.ppo_continuous_action_torchcompile as ppo
from leanrl.support import executables
from leanrl.tools import ablate, ablate_rows, ablation
from leanrl.tools.ablation import Row, Side, WholeRun
from leanrl.tools.trials import REPOSITORY

BENCHMARKS = REPOSITORY / "doc" / "benchmarks"
# Rows of the committed records that no page has in a table.
IN_WORDS = {"off_policy/ablate_memory_amd": 4, "ppo_atari_envpool/ablate": 1}
IN_WORDS |= {"ppo_atari_envpool/ablate_acting": 2, "ppo_atari_envpool/ablate_groups": 4}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """Nothing is compiled, a sample is one burst, and settings are put back."""
    monkeypatch.setattr(executables, "CompiledStep", lambda fn, device, cpp_wrapper=True, **options: fn)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    monkeypatch.setattr(ablation, "SAMPLE_SECONDS", 1e-9)
    num_threads, products = torch.get_num_threads(), ablation.PRODUCTS.fp32_precision
    yield
    torch.set_num_threads(num_threads)
    ablation.PRODUCTS.fp32_precision = products


@pytest.mark.parametrize("group", ablate.GROUPS)
def test_both_sides_of_every_row_compute_the_same(group, monkeypatch):
    def check(run: WholeRun) -> float:
        script = importlib.import_module(f"leanrl.{run.script}")
        script.validate(tyro.cli(script.Args, args=run.flags.split()))
        compile(run.change, "change", "exec")
        return 1.0

    monkeypatch.setattr(WholeRun, "sample", check)
    for row in ablate.GROUPS[group][0]:
        sides, difference = row.sides()  # or they differ
        assert all(side.sample() > 0 for side in sides.values())
        assert (difference is None) == isinstance(sides["with"], WholeRun)


def test_a_whole_run_says_how_fast_it_was():
    run = WholeRun("dqn_torchcompile", 100, "--no-compile --learning-starts 150 --total-timesteps 250")
    assert 0.001 < run.sample() < 10 and run.count == 100
    with pytest.raises(RuntimeError, match=r"(?s)exit 1.*AssertionError"):
        WholeRun("dqn_torchcompile", 0, "", "assert script.Args.num_envs > 1").sample()


def test_samples_leave_everything_as_it_was():
    side = ablate_rows.epoch(ppo)
    state = [ablation.state_of(part) for part in (side.parts.agent, side.parts.optimizer, side.parts.rollout)]
    before = deepcopy(state)
    moved = side.outcome()
    assert moved["agent"].abs().max() > 1e-3 and not moved["rollout.obs"].any() and side.sample() > 0
    torch.testing.assert_close(state, before, rtol=0, atol=0)


def test_two_rows_give_a_table_and_raw_timings(monkeypatch, capsys, tmp_path):
    flags = ("--rows", "gae", "environment", "--repeats", 2, "--out", tmp_path)
    assert run_tool_in_process(monkeypatch, ablate, *flags) == 0
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert [row[0] for row in cells(table)] == ["GAE by a scan", "SerialVectorEnv, not SyncVectorEnv"]
    record = json.loads((tmp_path / "ablate.json").read_text())
    assert record["machine"]["cpu_cores"] >= 1 and " --rows gae" in record["command"] and record["failures"] == {}
    gae, environment = record["rows"]
    assert (gae["group"], gae["row"], environment["row"]) == ("ppo", "gae", "environment")
    assert environment["difference"] == 0.0 and 0.0 < gae["difference"] < ablation.TOLERANCE
    assert (gae["calls_per_sample"], environment["calls_per_sample"]) == (1, 2048)
    saved = [turn["without"] - turn["with"] for turn in gae["seconds_per_sample"]]
    assert gae["seconds_saved_per_env_step"] == pytest.approx(sum(saved) / 2 / 2048)
    both = [turn["with"] for turn in environment["seconds_per_sample"]]
    assert environment["seconds_with"] == pytest.approx(sum(both) / 2 / 2048)


def test_sides_that_differ_are_not_timed_and_ctrl_c_keeps_what_was_measured(monkeypatch, capsys, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    sides = (lambda value=value: Side([lambda: torch.full((3,), value)], steps=1) for value in (1.0, 1.01))
    rows = [Row("unequal", "cheating", *sides), *ablate_rows.PPO, Row("interrupting", "", interrupt, interrupt)]
    monkeypatch.setitem(ablate.GROUPS, "ppo", (rows, ""))
    flags = ("--rows", "unequal", "gae", "interrupting", "sums", "--repeats", 1, "--out", tmp_path)
    assert run_tool_in_process(monkeypatch, ablate, *flags) == 130
    errors = capsys.readouterr().err
    assert "unequal: failed (cheating: the two sides do not compute the same, relative distance 0.0099)" in errors
    assert "interrupted: the results so far" in errors
    record = json.loads((tmp_path / "ablate.json").read_text())
    assert [line["row"] for line in record["rows"]] == ["gae"] and list(record["failures"]) == ["unequal"]
    assert run_tool_in_process(monkeypatch, ablate, "--rows", "interrupting", "--out", tmp_path / "nothing") == 130
    assert not any((tmp_path / "nothing").iterdir())


def test_groups_stand_for_their_rows():
    assert len(ablate.expand(ablate.Args().rows)) == sum(len(rows) for rows, _ in ablate.GROUPS.values())
    names = [(group, row.name) for group, row in ablate.expand(["dqn", "gae", "dqn_sums"])]
    assert names == [("dqn", "dqn_staging"), ("dqn", "dqn_sums"), ("ppo", "gae")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rows", "gea"), "--rows gea: no such row; did you mean gae?"),
        (("--rows", "gae", "gae"), "--rows gae gae: needs at least one, and none twice"),
        (("--repeats", "0"), "--repeats 0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path, flags, message):
    assert run_tool_in_process(monkeypatch, ablate, *flags, "--out", tmp_path / "out") == 2
    assert capsys.readouterr() == ("", f"ablate: {message}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("ablate*.json")), ids=lambda path: path.stem)
def test_tables_of_the_pages_are_those_of_the_records(path):
    """But for the names of tricks that are another today."""
    text = (REPOSITORY / "doc" / "optimizations.md").read_text(), ablate.render(json.loads(path.read_text())["rows"])
    page, record = ([line.replace(" ", "").split("|")[2:] for line in t.splitlines() if line[:1] == "|"] for t in text)
    assert len([row for row in record if row not in page]) == IN_WORDS.get(f"{path.parent.name}/{path.stem}", 0)
