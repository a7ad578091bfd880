"""Where metrics go: metrics.jsonl, TensorBoard, W&B."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from scripts import FINISHED, KINDS, SCRIPTS, run_tiny, start_process, summary, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leanrl.support import tracking
from leanrl.support.tracking import Tracker, read_metrics

UNTRACKED = SimpleNamespace(track=False)


def tensorboard_scalars(run_dir):
    """Each scalar's ``{step: value}``, as TensorBoard shows it."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {key: {event.step: event.value for event in events.Scalars(key)} for key in events.Tags()["scalars"]}


def test_metrics_of_a_run(script, finished_run):
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == list(range(64, FINISHED + 1, 64))
    fields = importlib.import_module(f"leanrl.{script}").Losses._fields
    names = [name.replace("qf", f"qf{i}") for name in fields for i in ((1, 2) if name.startswith("qf_") else (0,))]
    keys = {f"losses/{name}" for name in names} | {"charts/SPS"}
    keys |= {
        "ppo": {"charts/learning_rate", "losses/explained_variance"},
        "pqn": {"charts/learning_rate", "charts/epsilon"},
        "dqn": {"charts/epsilon"},
    }.get(script[:3], set())
    assert all(keys <= set(row) for row in rows)
    if "charts/epsilon" in keys:  # that of the step, or rollout, before
        module, passed = importlib.import_module(f"leanrl.{script}"), 1 if script.startswith("dqn") else 64
        args = module.Args(total_timesteps=FINISHED)
        assert all(row["charts/epsilon"] == module.linear_schedule(args, row["global_step"] - passed) for row in rows)
    # The keys that CleanRL's plots look for.
    expected = {"ppo": "value_loss", "pqn": "td_loss", "dqn": "td_loss"}.get(script[:3], "qf1_loss")
    assert f"losses/{expected}" in keys
    with_episodes = [row for row in rows if "charts/episodic_return" in row]
    assert with_episodes and all(row["charts/episodic_length"] > 0 for row in with_episodes)
    assert with_episodes[-1]["charts/episodes"] == summary(finished_run)["episodes"]


def test_tensorboard_shows_the_same(finished_run):
    scalars, rows = tensorboard_scalars(finished_run), read_metrics(finished_run)
    assert set(scalars) == set().union(*rows) - {"global_step"}
    for key, values in scalars.items():
        expected = {row["global_step"]: row[key] for row in rows if key in row}
        assert values == pytest.approx(expected, rel=1e-5)


def log(run_dir, points, global_step=0):
    """Log points by step, of a run that starts at ``global_step``."""
    tracker = Tracker(run_dir, UNTRACKED, global_step)
    for step, values in points.items():
        tracker.log(step, values)
    tracker.close()


def test_what_json_cannot_hold_becomes_null(tmp_path):
    log(tmp_path, {1: {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.5}})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row == {"global_step": 1, "a": None, "b": None, "c": None, "d": 0.5}


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path):
    log(tmp_path, {step: {"x": step} for step in range(1, 6)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 6, "x"')  # torn by a kill
    assert [row["global_step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]

    log(tmp_path, {}, global_step=4)
    for steps in (tensorboard_scalars(tmp_path)["x"], (row["global_step"] for row in read_metrics(tmp_path))):
        assert [*steps] == [1, 2, 3, 4]

    log(tmp_path, {step: {"x": 10 * step} for step in range(4, 8)}, global_step=3)
    expected = {1: 1, 2: 2, 3: 3, 4: 40, 5: 50, 6: 60, 7: 70}
    assert {row["global_step"]: row["x"] for row in map(json.loads, open(tmp_path / "metrics.jsonl"))} == expected
    assert len(read_metrics(tmp_path)) == 7
    assert tensorboard_scalars(tmp_path)["x"] == expected


def test_wandb_is_imported_only_to_track(tmp_path):
    code = f"""
import sys
from importlib import import_module
from pathlib import Path
from scripts import run_tiny
for script in {SCRIPTS}:
    import_module("leanrl." + script)
for script in {KINDS[::-1]}:
    run_tiny(script, Path("{tmp_path}"), "--total-timesteps=64", name=script)
    assert script == "{KINDS[0]}" or "torch._dynamo" not in sys.modules, "1.7 s that nobody compiles for"
assert "torch.utils.tensorboard" in sys.modules
assert "wandb" not in sys.modules, "wandb was imported"
"""
    tests = os.path.dirname(__file__)
    process = subprocess.run([sys.executable, "-c", code], cwd=tests, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_track_works_without_a_key_and_offline(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    # No key in the home directory, and no way out.
    environment |= {"HOME": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    script = KINDS[0]
    flags = [*tiny(script), "--total-timesteps=256", f"--runs-dir={tmp_path}", "--run-name=run:1", "--track"]
    process = start_process(script, *flags, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (offline,) = (tmp_path / "run:1" / "wandb").glob("offline-run-*")
    (log,) = offline.glob("run-*.wandb")
    assert b"losses/policy_loss" in log.read_bytes()
    assert summary(tmp_path / "run:1")["global_step"] == 256


def test_wandb_is_told_how_a_run_ended(monkeypatch, tmp_path):
    codes = []
    board = SimpleNamespace(log=lambda _: None, finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setattr(tracking, "_start_wandb", lambda *_: board)
    run_tiny(KINDS[0], tmp_path, "--track", "--total-timesteps=64")
    with pytest.raises(RuntimeError, match="diverged"):
        run_tiny(KINDS[0], tmp_path, "--track", "--total-timesteps=256", "--learning-rate=1e30", name="diverged")
    assert codes == [0, 1]
