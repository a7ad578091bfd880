"""What the tools do for Atari: where a step's time goes, and what the ablation compares."""

import json

import pytest
import torch
from scripts import run_tool_in_process

import leanrl.ppo_atari_envpool as reference
import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.tools import ablate_ppo_atari, ablation, parts_atari


def test_parts_of_a_real_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts_atari, "in_process", lambda fn, *args, **_: fn(*args))
    monkeypatch.setattr(parts_atari, "ALONE_SECONDS", 0.1)
    for module, names in (
        (fast, ("Run", "make_executables")),
        (parts_atari.EnvPoolVectorEnv, ("send",)),
        (parts_atari.AtariVectorEnv, ("recv",)),
    ):
        for name in names:  # puts back what the tool changes in a process of its own
            monkeypatch.setattr(module, name, getattr(module, name))
    flags = ["--scripts", "ppo_atari_envpool_torchcompile:eager", "--num-envs", "2", "--iterations", "2"]
    flags += ["--out", str(tmp_path), "--", "--num-threads", "1", "--num-steps", "16"]
    assert run_tool_in_process(monkeypatch, parts_atari, *flags) == 0
    (row,) = json.loads((tmp_path / "parts_atari.json").read_text())["rows"]
    assert set(row["parts_us"]) == {*parts_atari.PARTS, parts_atari.REST}
    assert all(microseconds > 0 for microseconds in row["parts_us"].values())
    assert sum(row["parts_us"].values()) == pytest.approx(1e6 / row["sps"])
    assert row["floors_us"]["emulation"] == pytest.approx(1e6 / row["envpool_sps"])
    # Four epochs of forward and backward, which has two products for each of the forward's, in the first layer one.
    assert 4 * 2.5 < row["floors_us"]["update"] / row["floors_us"]["inference"] < 4 * 3
    assert "kept" in capsys.readouterr().out and (tmp_path / "parts_atari.png").stat().st_size > 10_000


def test_parts_are_those_of_the_steps_that_the_speed_is_of(monkeypatch):
    """A reference's first iteration is in neither."""
    for name in ("Run", "policy_step", "train_epoch"):
        monkeypatch.setattr(reference, name, getattr(reference, name))
    monkeypatch.setattr(parts_atari.EnvPoolVectorEnv, "send", parts_atari.EnvPoolVectorEnv.send)
    monkeypatch.setattr(parts_atari.AtariVectorEnv, "recv", parts_atari.AtariVectorEnv.recv)
    flags = ["--env-id=Breakout-v5", "--num-envs=4", "--num-steps=32", "--num-threads=1"]
    parts = parts_atari.observe_run("ppo_atari_envpool", flags, 2)["parts_us"]
    assert 0 < parts[parts_atari.REST] < sum(parts[part] for part in parts_atari.PARTS) / 2


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--scripts", "td3_continuous_action:eager"], "is not PPO on Atari"),
        (["--scripts", "pqn_atari_envpool:eager"], "is not PPO on Atari"),
        (["--num-envs", "0"], "must be at least 1"),
        (["--env-id", "Brekout-v5"], "did you mean Breakout-v5"),
        (["--", "--num-envs", "4"], "is set by this tool"),
    ],
)
def test_bad_input_is_one_line(flags, reason, tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert run_tool_in_process(monkeypatch, parts_atari, *out, *flags) == 2
    errors = capsys.readouterr().err
    assert reason in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("channels_last", [True, False])
def test_variants_that_are_compared_compute_the_same(channels_last):
    num_threads = torch.get_num_threads()
    try:
        sides = ablate_ppo_atari.reference_updating(channels_last), ablate_ppo_atari.updating(ablation.eager)
        assert ablate_ppo_atari.same("eager", *sides).difference < ablate_ppo_atari.TOLERANCE
    finally:
        torch.set_num_threads(num_threads)
