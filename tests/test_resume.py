"""Interrupted and killed runs go on to where they would have come."""

import importlib
import os
import random
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace
from unittest.mock import create_autospec

import psutil
import pytest
import torch
from scripts import (
    ATARI,
    FINISHED,
    KINDS,
    ON_POLICY,
    ON_POLICY_REFERENCES,
    PPO,
    course,
    files_in,
    leaves,
    newest_checkpoint,
    run,
    run_tiny,
    run_until,
    summary,
    tiny,
    tiny_env,
    tiny_optimizer_steps,
    wait_until,
)

from leanrl.support.checkpoints import list_checkpoints, load_checkpoint
from leanrl.support.envs import env_seeds
from leanrl.support.run import Run
from leanrl.support.tracking import read_metrics


def last_step(run_dir):
    return [0, *(row["global_step"] for row in read_metrics(run_dir))][-1]


def assert_same_course(run_dir, uninterrupted):
    """Every log point once; the same end."""
    ours, theirs = course(run_dir), course(uninterrupted)
    if summary(run_dir)["script"] in PPO + ATARI:  # which start fresh episodes when they resume
        ours, theirs = ([(row["global_step"], row["charts/learning_rate"]) for row in rows] for rows in (ours, theirs))
        assert len({rate for _, rate in ours}) == len(ours)
    assert ours == theirs
    ours, theirs = summary(run_dir), summary(uninterrupted)
    for key in ("global_step", "optimizer_steps", "interrupted"):
        assert ours[key] == theirs[key]
    assert newest_checkpoint(run_dir)[0] == theirs["global_step"]
    assert not list(run_dir.rglob("*.tmp"))


def assert_whole(script, run_dir, every):
    """Every log point once, and all updates up to the last one."""
    steps = [row["global_step"] for row in read_metrics(run_dir)]
    end = summary(run_dir)["global_step"]
    assert steps == list(range(every, end + 1, every))
    expected = len(steps) * 4 if script in ON_POLICY else tiny_optimizer_steps(script, end)
    assert summary(run_dir)["optimizer_steps"] == expected
    assert not list(run_dir.rglob("*.tmp"))


def test_interrupted_runs_come_to_the_same_end(script, finished_run, tmp_path, capsys):
    """Also from the checkpoint before the last one, where that is torn: nothing up to there is trained again."""
    run_dir = tmp_path / "run"
    flags = [*tiny(script), f"--total-timesteps={FINISHED}", f"--runs-dir={tmp_path}", "--run-name=run"]
    for step, words in ((320, flags), (640, ["--resume", run_dir])):
        assert run_until(script, step, *words) == 0
        assert (summary(run_dir)["global_step"], summary(run_dir)["interrupted"]) == (step, True)
        assert newest_checkpoint(run_dir)[0] == last_step(run_dir) == step
    newest, before = list_checkpoints(run_dir / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:1000])
    kept = read_metrics(run_dir)[:5]
    assert kept[-1]["global_step"] == 320
    capsys.readouterr()
    assert run(script, "--resume", run_dir) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and newest.name in warning and before.name in warning
    assert read_metrics(run_dir)[:5] == kept
    assert_same_course(run_dir, finished_run)


# As processes: one of each kind, and two whose environments are threads.
THREADED = ["ppo_atari_envpool_torchcompile", "fast_sac_torchcompile --env-backend=envpool"]
SIGNALS = {KINDS[0]: [signal.SIGUSR1, signal.SIGINT], **{key: [signal.SIGTERM] for key in [KINDS[1], *THREADED]}}


@pytest.mark.parametrize("script, signals", SIGNALS.items())
def test_signals_stop_a_run_and_resume_continues_it(script, signals, start, tmp_path):
    run_dir = tmp_path / "run"
    script, *flags = script.split()
    flags += [*tiny(script), "--total-timesteps", 10**9, "--runs-dir", tmp_path, "--run-name", "run"]
    for number in signals:
        before = last_step(run_dir)
        process = start(script, *flags, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda before=before: last_step(run_dir) >= before + 128, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert number.name in err and "Traceback" not in err
        result = summary(run_dir)
        assert result["interrupted"] is True and result["global_step"] > before
        assert newest_checkpoint(run_dir)[0] == result["global_step"]
        assert last_step(run_dir) == result["global_step"] // 64 * 64
        flags = ["--resume", run_dir]
    assert run(script, *flags, "--total-timesteps", last_step(run_dir) + 128) == 0
    assert_whole(script, run_dir, every=64)


@pytest.mark.parametrize("script", KINDS)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_kill_while_checkpoints_are_written(script, start, tmp_path, kills):
    run_dir = tmp_path / "run"
    sizes = ["--num-steps", 8, "--num-minibatches", 4] if script in ON_POLICY else ["--log-every", 8]
    flags = [*tiny(script), *sizes, "--checkpoint-every", 8, "--total-timesteps", 10**9]
    flags += ["--runs-dir", tmp_path, "--run-name", "run"]
    for _ in range(kills):
        before, _ = newest_checkpoint(run_dir) if run_dir.exists() else (0, None)
        process = start(script, *flags, stdout=subprocess.DEVNULL)
        wait_until(lambda before=before: last_step(run_dir) >= before + 40, process)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.wait()
        step, _ = newest_checkpoint(run_dir)
        # The last log point may have come just before its checkpoint.
        assert before + 32 <= step <= last_step(run_dir)
        flags = ["--resume", run_dir]
    assert run(script, *flags, "--total-timesteps", last_step(run_dir) + 64) == 0
    assert_whole(script, run_dir, every=8)


@pytest.fixture
def run_dir(finished_run, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.mark.parametrize("script", KINDS, indirect=True)
def test_a_run_without_a_checkpoint_starts_anew(script, finished_run, run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    assert run(script, "--resume", run_dir) == 2  # it has ended
    (run_dir / "summary.json").unlink()
    metrics = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(metrics[: len(metrics) // 2])
    assert run(script, "--resume", run_dir) == 0
    assert_same_course(run_dir, finished_run)


@pytest.mark.parametrize("script", KINDS)
def test_a_start_that_was_killed_at_once_can_be_repeated(script, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json.tmp").write_text('{"scr')
    assert last_step(run_tiny(script, tmp_path, "--total-timesteps=64")) == 64
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("script", KINDS, indirect=True)
@pytest.mark.parametrize("content", [b"", b"garbage" * 1000])
def test_nothing_but_garbage_is_refused(script, run_dir, capsys, content):
    (run_dir / "checkpoints" / "step_000000000064.pt").write_bytes(content)
    for path in list_checkpoints(run_dir / "checkpoints"):
        path.write_bytes(content)
    before = files_in(run_dir)
    assert run(script, "--resume", run_dir) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{script}.py: --resume {run_dir}: no readable checkpoint")
    assert files_in(run_dir) == before


def test_a_finished_run_resumes_to_its_end(script, finished_run, run_dir):
    path = list_checkpoints(run_dir / "checkpoints")[0]
    step, before = load_checkpoint(path, {"script": script, "env_id": tiny_env(script)})
    assert step == FINISHED
    assert run(script, "--resume", run_dir) == 0
    assert (run_dir / "metrics.jsonl").read_bytes() == (finished_run / "metrics.jsonl").read_bytes()
    ours, theirs = summary(run_dir), summary(finished_run)
    for key in ("wall_seconds", "warmup_seconds"):
        assert ours.pop(key) >= theirs.pop(key), "not a total"
    assert ours == theirs
    # And all that was saved was restored, since saving it again gives the same.
    after = newest_checkpoint(run_dir)[1]
    fresh = {"obs_rms"} if script in ON_POLICY else set()  # has seen fresh episodes' first observations
    for key in before["script"].keys() - fresh:
        assert leaves(after["script"][key]) == leaves(before["script"][key])
    assert leaves(after["rng"]) == leaves(before["rng"])


@pytest.mark.parametrize("script", ["ppo_continuous_action_torchcompile"], indirect=True)
def test_a_compiled_run_resumes_at_its_annealed_rate(script, run_dir, tmp_path):
    """The graph steps by the rate of the iteration, which the loaded optimiser's tensor is filled with."""
    before = newest_checkpoint(run_dir)[1]["script"]["agent"]
    ways = []
    for name, mode in (("eager", []), ("compiled", ["--compile"])):
        shutil.copytree(run_dir, tmp_path / name)
        assert run(script, "--resume", tmp_path / name, "--total-timesteps", FINISHED + 64, *mode) == 0
        after = newest_checkpoint(tmp_path / name)[1]["script"]["agent"]
        ways.append(torch.cat([(after[key] - before[key]).flatten() for key in before]))
    eager, compiled = ways
    assert eager.abs().max() > 1e-5
    # The rate is a 16th of the first; another one would make another way.
    assert (compiled - eager).norm() < 0.1 * eager.norm()


def test_more_timesteps(script, run_dir, monkeypatch):
    seeds = create_autospec(env_seeds, side_effect=env_seeds)
    monkeypatch.setattr("leanrl.support.envs.env_seeds", seeds)
    total = FINISHED + 320  # 20 log points instead of 15
    assert run(script, "--resume", run_dir, "--total-timesteps", total) == 0
    assert {call.args[3] for call in seeds.call_args_list} == {FINISHED}  # no episode is played again
    rows = read_metrics(run_dir)
    assert [row["global_step"] for row in rows] == list(range(64, total + 1, 64))
    if script in ON_POLICY:  # the learning rate falls to the new end
        rate = importlib.import_module(f"leanrl.{script}").Args.learning_rate
        assert rows[-1]["charts/learning_rate"] == pytest.approx(rate / 20)
        assert rows[15]["charts/learning_rate"] == pytest.approx(rate * 5 / 20)
    assert summary(run_dir)["optimizer_steps"] == tiny_optimizer_steps(script, total)
    # The next resume knows the new end.
    assert run(script, "--resume", run_dir) == 0
    assert summary(run_dir)["global_step"] == last_step(run_dir) == total


@pytest.mark.parametrize("script", KINDS, indirect=True)
@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_resumes_by_itself(script, run_dir, monkeypatch, capsys, variable):
    total, folder = FINISHED + 64, os.path.relpath(run_dir.parent)
    flags = [*tiny(script), f"--total-timesteps={total}", f"--runs-dir={folder}", "--run-name=run"]
    monkeypatch.setenv(variable, "0")
    assert run(script, *flags) == 2
    monkeypatch.setenv(variable, "1")
    capsys.readouterr()
    assert run(script, *flags, "--gamma=0.5") == 2
    assert "--gamma 0.5: cannot change on --resume" in capsys.readouterr().err
    assert run(script, *flags) == 0
    assert [row["global_step"] for row in read_metrics(run_dir)] == list(range(64, total + 1, 64))
    # The first start of a job that was restarted before it began.
    assert run(script, *flags, "--run-name=other") == 0
    assert summary(run_dir.parent / "other")["global_step"] == total


@pytest.mark.parametrize("script", KINDS[:1], indirect=True)
def test_a_restart_does_not_resume_an_earlier_run(script, run_dir, monkeypatch, capsys):
    """torchrun also starts again what was refused because its directory is there from an earlier call."""
    started = psutil.Process(os.getppid()).create_time()
    os.utime(run_dir / "args.json", (started - 1, started - 1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    flags = ["--runs-dir", run_dir.parent, "--run-name", "run"]
    assert run(script, *tiny(script), *flags) == 2
    assert "exists; continue it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("script", KINDS, indirect=True)
def test_a_moved_run_resumes_but_not_to_an_earlier_end(script, run_dir, capsys):
    """It would train nothing, and the run would look finished."""
    moved = run_dir.rename(run_dir.parent / "moved")
    before = (moved / "args.json").read_text()
    assert run(script, "--resume", moved, "--total-timesteps", 512) == 2
    reason = f"the run is already at step {FINISHED}; give a later step as the end of the run"
    assert capsys.readouterr().err == f"{script}.py: --total-timesteps 512: {reason}\n"
    assert (moved / "args.json").read_text() == before
    assert run(script, "--resume", moved, "--total-timesteps", FINISHED + 64) == 0
    assert last_step(moved) == FINISHED + 64
    assert not run_dir.exists()


@pytest.mark.parametrize("script", KINDS[:1])
def test_the_reader_of_the_output_may_go_away(script, start, tmp_path):
    """Ctrl-C also ends the ``tee`` that a run's output is piped to; the run still checkpoints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    flags = [*tiny(script), "--total-timesteps", 10**9, "--runs-dir", tmp_path, "--run-name", "run"]
    process = start(script, *flags, **pipes)
    wait_until(lambda: last_step(tmp_path / "run") > 0, process)
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 0
    step = summary(tmp_path / "run")["global_step"]
    assert summary(tmp_path / "run")["interrupted"] and newest_checkpoint(tmp_path / "run")[0] == step


@pytest.mark.cuda
def test_a_run_may_move_to_another_device(script, run_dir):
    for end, device, name in ((FINISHED + 64, "cuda", "cuda:0"), (FINISHED + 192, "cpu", "cpu")):
        assert run(script, "--resume", run_dir, "--device", device, "--total-timesteps", end) == 0
        assert summary(run_dir)["device"] == name
    assert [row["global_step"] for row in read_metrics(run_dir)] == list(range(64, FINISHED + 193, 64))


@pytest.fixture
def second_a_step(monkeypatch):
    """A clock that a run's steps drive: a second passes at the end of each, of an on-policy script's each iteration."""
    tick = create_autospec(Run.checkpoint_due, side_effect=Run.checkpoint_due)
    monkeypatch.setattr(Run, "checkpoint_due", tick)
    monkeypatch.setattr("leanrl.support.run.time", SimpleNamespace(perf_counter=lambda: float(tick.call_count)))


def test_max_seconds_end_a_run(script, tmp_path, second_a_step, capsys):
    """Of training alone, which begins with the first update; and of all starts together."""

    def expected_step(seconds: int) -> int:
        # The first update is the warm-up's end: within the second that then passes.
        return 64 * seconds if script in ON_POLICY else 55 + seconds

    # Off policy, 8 seconds pass from one update to the next.
    first, second, sps = (4, 6, 64) if script in ON_POLICY else (9, 20, 8 / 9)
    run_dir = run_tiny(script, tmp_path, "--total-timesteps=6400", "--save-model", f"--max-seconds={first}")
    result = summary(run_dir)
    assert result["global_step"] == expected_step(first) and not result["interrupted"]
    # A reference's first iteration is warm-up, but the second that it takes passes once the clock runs.
    assert result["sps"] == pytest.approx(48 if script in ON_POLICY_REFERENCES else sps)
    assert newest_checkpoint(run_dir)[0] == result["global_step"] and (run_dir / "model.pt").exists()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    if script in ON_POLICY:  # the second of an iteration passes after its line
        assert [line.split("  ")[-1] for line in lines[1:]] == [f"{left} s left" for left in range(first - 1, 0, -1)]

    assert run(script, "--resume", run_dir) == 0  # whose time is up
    assert summary(run_dir)["global_step"] == result["global_step"]
    assert run(script, "--resume", run_dir, f"--max-seconds={second}") == 0
    assert summary(run_dir)["global_step"] == expected_step(second)
    assert run(script, "--resume", run_dir) == 0  # the next start knows the new end
    assert summary(run_dir)["global_step"] == expected_step(second)


@pytest.mark.parametrize("script", KINDS[1:], indirect=True)
def test_filling_a_replay_again_is_no_training(script, tmp_path, second_a_step):
    run_dir = run_tiny(script, tmp_path, "--total-timesteps=6400", "--no-checkpoint-replay", "--max-seconds=9")
    assert run(script, "--resume", run_dir, "--max-seconds=10") == 0
    # 48 steps fill it, 8 more are due an update; the second passes in the step that takes it.
    assert summary(run_dir)["global_step"] == 64 + 48 + 8
