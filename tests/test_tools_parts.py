"""The tool that takes an environment step apart."""

import json
from types import SimpleNamespace

import pytest
import torch
from scripts import run_tool_in_process

import leanrl.dqn as dqn
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


def test_a_profile_without_a_kernel_is_no_result_of_a_gpu():
    """As the profiler of some CUDA versions makes in a second session."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def event(key: str, device_type, microseconds: float) -> SimpleNamespace:
        times = dict.fromkeys(("cpu_time_total", "self_cpu_time_total", "self_device_time_total"), microseconds)
        return SimpleNamespace(key=key, device_type=device_type, **times)

    events = [event("env.step", cpu, 50.0), event("aten::mm", cpu, 30.0)]
    with pytest.raises(SystemExit, match="saw no kernel"):
        parts.by_part(SimpleNamespace(key_averages=lambda: events), 2, 1e-3, "cuda")
    events.append(event("ampere_sgemm_128", gpu, 40.0))
    found = parts.by_part(SimpleNamespace(key_averages=lambda: events), 2, 1e-3, "cuda")
    assert (found["environment"], found["matrix products"], found[parts.REST]) == (25.0, 20.0, 500.0 - 45.0)


def test_only_what_follows_the_last_start_of_the_clock_is_profiled(monkeypatch):
    profiler, sessions = parts.profiler, []
    monkeypatch.setattr(parts, "profiler", lambda: (sessions.append(1), profiler())[1])
    for name in ("Run", "make_envs"):
        monkeypatch.setattr(dqn, name, getattr(dqn, name))
    flags = ["--learning-starts=40", "--total-timesteps=60", "--batch-size=8", "--num-threads=1", "--device=cpu"]
    monkeypatch.setitem(parts.CPU_OPTIONS, "cpp.enable_kernel_profile", False)
    assert parts.observe_run("dqn", flags, "parts")["parts_us"]["environment"] > 0
    assert len(sessions) == 1


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
