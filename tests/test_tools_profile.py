"""tools/profile: where the time of an environment step goes."""

import json
import math
import multiprocessing
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from scripts import run_tool_in_process, with_long

from leanrl.support.errors import UsageError
from leanrl.tools import profile
from leanrl.tools.trials import REPOSITORY


@pytest.mark.parametrize("name", ["off_policy", "ppo_atari_envpool"])
def test_pictures_of_committed_records(name):
    """Their tables are those of the pages, see test_tools_report."""
    record = json.loads((REPOSITORY / "doc" / "benchmarks" / name / "parts.json").read_text())
    (legend,) = profile.draw(record).legends
    drawn = {part for row in record["rows"] for part, us in row["parts_us"].items() if us >= 0.5}
    assert drawn == {text.get_text() for text in legend.get_texts()} & {*profile.KINDS, profile.REST}


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(profile, "in_process", lambda fn, *args, **_: fn(*args))
    monkeypatch.setattr(profile, "ALONE_SECONDS", 0.1)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def row_of(monkeypatch, out, *words) -> dict:
    """The one row that the tool writes."""
    assert run_tool_in_process(monkeypatch, profile, "--out", out, *words) == 0
    assert (out / "profile.png").stat().st_size > 10_000
    (row,) = json.loads((out / "profile.json").read_text())["rows"]
    assert all(microseconds >= 0 for microseconds in row["parts_us"].values())
    assert row["parts_us"]["environment"] > 0 and row["parts_us"]["matrix products"] > 0
    assert sum(row["parts_us"].values()) == pytest.approx(row["profiled_step_us"], rel=0.2)
    assert row["floor_us"] == pytest.approx(1e3 * row["mflop"] / row["product_gflops"])
    return row


def test_a_run(in_this_process, tmp_path, monkeypatch, capsys):
    sessions, session = [], torch.profiler.profile
    monkeypatch.setattr(torch.profiler, "profile", lambda: (sessions.append(1), session())[1])
    words = ["td3_continuous_action_torchcompile:eager --batch-size 32", "--", "--env-id", "InvertedPendulum-v5"]
    row = row_of(monkeypatch, tmp_path, "--steps", 30, *words, "--num-threads", 1, "--learning-starts", 20)
    assert row["who"].startswith("td3_continuous_action_torchcompile --batch-size 32 --env-id")
    # A critic-only update has 9 products of 32 x 256 x 256: target actor, and 2 critics' target, forward, 2 backward.
    assert 2 * 32 * 256**2 * 9 / 1e6 < row["mflop"] < 2 * 2 * 32 * 256**2 * 9 / 1e6
    assert len(sessions) == 1 and "environments alone" in capsys.readouterr().out


@pytest.mark.parametrize("script", with_long(["ppo_atari_envpool_torchcompile:eager", "pqn_atari_envpool"]))
def test_a_run_on_images(script, in_this_process, tmp_path, monkeypatch):
    words = ["--", "--num-envs", "2", "--num-threads", "1", "--num-steps", "16"]
    row = row_of(monkeypatch, tmp_path, "--steps", 64, script, *words)
    assert row["num_envs"] == 2 and 0 < row["envs_us"] < 1e6
    # Convolutions are products: each of the four epochs goes forward and back over every observation.
    assert row["parts_us"]["matrix products"] > row["parts_us"]["copies"] and row["mflop"] > 100


def test_whole_rollouts_after_the_first_of_a_reference():
    """The parts are those of the steps that the speed is of."""
    flags = ["--num-envs=4", "--num-steps=32", "--num-threads=1", "--device=cpu"]
    found = profile.watch("ppo_atari_envpool", flags, 130, "counted")
    assert found["args"].total_timesteps == (1 + 2) * 128 and found["steps"] == 2 * 128


def test_a_profile_without_a_kernel_is_no_result_of_a_gpu():
    """As the profiler of some CUDA versions makes in a second session."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def event(key: str, device_type, microseconds: float) -> SimpleNamespace:
        times = dict.fromkeys(("cpu_time_total", "self_cpu_time_total", "self_device_time_total"), microseconds)
        return SimpleNamespace(key=key, device_type=device_type, is_user_annotation="#" in key, **times)

    events = [event("env.step", cpu, 50.0), event("aten::mm", cpu, 30.0)]
    found = profile.by_kind(SimpleNamespace(key_averages=lambda: events), 2, 500.0, "cpu")
    assert (found["environment"], found["matrix products"], found[profile.REST]) == (25.0, 15.0, 500.0 - 40.0)
    with pytest.raises(RuntimeError, match="saw no kernel"):
        profile.by_kind(SimpleNamespace(key_averages=lambda: events), 2, 500.0, "cuda")
    events += [event("ampere_sgemm_128", gpu, 40.0), event("Optimizer.step#Adam.step", gpu, 60.0)]
    found = profile.by_kind(SimpleNamespace(key_averages=lambda: events), 2, 500.0, "cuda")
    assert (found["environment"], found["matrix products"], found[profile.REST]) == (25.0, 20.0, 500.0 - 45.0)


def test_a_process_ends_with_its_function_or_with_the_tool():
    assert profile.in_process(math.sqrt, 4.0) == 2.0
    with pytest.raises(UsageError, match="no such script"):
        profile.in_process(profile.contender_of, "no_such_script", ())
    handler = signal.signal(signal.SIGALRM, lambda *_: sys.exit("terminated"))
    signal.alarm(2)
    with pytest.raises(SystemExit, match="terminated"):
        profile.in_process(time.sleep, 60)
    signal.signal(signal.SIGALRM, handler)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name scripts"),
        (["td3_continuous_action:compile"], "profile: td3_continuous_action:compile: no such mode; choose from eager"),
        (["td3_continuous_action_torchcompile"], "must be one mode"),
        (["cleanba_ppo:eager"], "already log the times of their parts"),
        (["dqn --seed 2"], "this tool sets it"),
        (["--steps", "9", "dqn"], "must be at least 10"),
    ],
)
def test_bad_input_is_one_line(words, reason, tmp_path, refusal):
    assert reason in refusal(profile, "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
