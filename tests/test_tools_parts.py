"""The tool that takes an environment step apart."""

import json

import pytest
from test_tools_compare import run_tool_in_process

from leanrl.tools import parts


def test_parts_of_a_real_run(tmp_path, monkeypatch, capsys):
    flags = ["--scripts", "td3_continuous_action_torchcompile:eager", "--steps", "30", "--learning-starts", "20"]
    flags += [
        "--out",
        str(tmp_path),
        "--",
        "--env-id",
        "InvertedPendulum-v5",
        "--batch-size",
        "32",
        "--num-threads",
        "1",
    ]
    assert run_tool_in_process(monkeypatch, parts, *flags) == 0
    (row,) = json.loads((tmp_path / "parts.json").read_text())["rows"]
    assert all(microseconds >= 0 for microseconds in row["parts_us"].values())
    assert row["parts_us"]["environment"] > 0 and row["parts_us"]["matrix products"] > 0
    assert sum(row["parts_us"].values()) == pytest.approx(row["profiled_step_us"], rel=0.2)
    # A critic-only update has 9 products of 32 x 256 x 256: target actor, and 2 critics' target, forward, 2 backward.
    assert 2 * 32 * 256**2 * 9 / 1e6 < row["mflop"] < 2 * 2 * 32 * 256**2 * 9 / 1e6
    assert "environment" in capsys.readouterr().out and (tmp_path / "parts.png").stat().st_size > 10_000


def test_a_rollout_is_taken_apart_as_a_whole():
    args = parts.Args(steps=2049, script_args=("--num-envs=1",))
    script, flags, mode = parts.command("ppo_continuous_action_torchcompile:compile", args)
    assert (script, mode) == ("ppo_continuous_action_torchcompile", ["--compile"])
    assert flags == ["--num-envs=1", "--total-timesteps=4096"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--scripts", "ppo_atari_envpool:eager"], "see leanrl.tools.parts_atari"),
        (["--scripts", "td3_continuous_action:compile"], "no such mode"),
        (["--scripts", "no_such_script:eager"], "no such script"),
    ],
)
def test_bad_input_is_one_line(flags, reason, tmp_path, monkeypatch, capsys):
    assert run_tool_in_process(monkeypatch, parts, *flags, "--out", tmp_path / "out") == 2
    errors = capsys.readouterr().err
    assert reason in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()
