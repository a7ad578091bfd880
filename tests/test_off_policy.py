"""What the off-policy scripts promise: exact resumption, a replay of what happened, updates as the schedule says."""

import gc
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.envs.registration import EnvSpec
from scripts import OFF_POLICY, course, leaves, newest_checkpoint, run, run_tiny, run_until, summary, tiny, with_long

from leanrl.support.checkpoints import list_checkpoints
from leanrl.support.envs import SerialVectorEnv
from leanrl.support.run import Run
from leanrl.support.tracking import read_metrics


def assert_same_run(run_dir, uninterrupted):
    """Bit for bit the same parameters, replay, simulators, random generators and log points."""
    (our_step, ours), (their_step, theirs) = newest_checkpoint(run_dir), newest_checkpoint(uninterrupted)
    assert our_step == their_step
    assert ours["script"].keys() == theirs["script"].keys()
    for part in ours["script"]:
        assert leaves(ours["script"][part]) == leaves(theirs["script"][part]), part
    assert leaves(ours["rng"]) == leaves(theirs["rng"])
    for counters in (ours["run"], theirs["run"]):
        del counters["wall_seconds"], counters["training_seconds"], counters["warmup_seconds"], counters["sps_before"]
    assert ours["run"] == theirs["run"]
    assert course(run_dir) == course(uninterrupted)


@pytest.mark.parametrize("script", [*OFF_POLICY, "pqn", "pqn_torchcompile"])
def test_resume_is_exact(script, tmp_path):
    """Interrupted before the first update, where an episode has just ended, and in the middle of one."""
    flags = ["--total-timesteps=400", "--num-envs=2"]
    if script in OFF_POLICY:
        # A log point each step: between two updates it shows the losses of the last one. The replay wraps around.
        flags += ["--log-every=1", "--buffer-size=150", "--updates-per-step=0.3"]
    else:
        flags += ["--num-steps=1", "--num-minibatches=1"]
    straight, run_dir = run_tiny(script, tmp_path, *flags, name="straight"), tmp_path / "run"
    assert run_until(script, 30, *tiny(script), *flags, f"--runs-dir={tmp_path}", "--run-name=run") == 0
    assert run_until(script, 200, "--resume", run_dir, after_an_end=True) == 0
    assert 200 <= summary(run_dir)["global_step"] < 320
    assert any(newest_checkpoint(run_dir)[1]["script"]["envs"]["simulators"]["done"])
    assert run_until(script, 333, "--resume", run_dir) == 0
    assert summary(run_dir)["interrupted"]
    assert run(script, "--resume", run_dir) == 0
    assert_same_run(run_dir, straight)
    assert summary(run_dir)["optimizer_steps"] == ((400 - 48) * 3 // 10 if script in OFF_POLICY else 200)


# The fast variants; but for DQN's only with --all.
@pytest.mark.parametrize("script", with_long(OFF_POLICY[1::2], long=OFF_POLICY[:-1]))
def test_resume_of_a_compiled_run_is_exact(script, start, tmp_path):
    """Compilation and its warm-up leave no trace."""
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    flags = ["--compile", "--total-timesteps=400", "--log-every=1", "--checkpoint-every=201"]
    flags += [f"--runs-dir={tmp_path}", "--run-name=straight"]
    # Processes of their own: compilation sets switches of the whole process.
    assert start(script, *tiny(script), *flags).wait(timeout=600) == 0
    shutil.copytree(straight, run_dir)
    newest, before = list_checkpoints(run_dir / "checkpoints")
    assert before.name == "step_000000000201.pt"
    newest.unlink()
    assert start(script, "--resume", run_dir).wait(timeout=600) == 0
    assert_same_run(run_dir, straight)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
@pytest.mark.parametrize("script", OFF_POLICY)
def test_a_resumed_run_lets_its_checkpoint_go(script, tmp_path, monkeypatch):
    """Mapped into memory, it would take as much as the replay again."""
    flags = [*tiny(script), "--total-timesteps=400", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert run_until(script, 200, *flags) == 0
    mapped = []

    def checkpoint_due(self):
        gc.collect()
        mapped.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line)
        return False

    monkeypatch.setattr(Run, "checkpoint_due", checkpoint_due)
    assert run(script, "--resume", tmp_path / "run", "--total-timesteps=210") == 0
    assert not mapped


@pytest.mark.parametrize("script", OFF_POLICY)
def test_resume_without_the_replay_fills_a_new_one_first(script, tmp_path, monkeypatch):
    run_dir, flags = tmp_path / "run", ["--total-timesteps=400", "--no-checkpoint-replay", "--log-every=1"]
    assert run_until(script, 200, *tiny(script), *flags, f"--runs-dir={tmp_path}", "--run-name=run") == 0
    assert newest_checkpoint(run_dir)[1]["script"]["replay"] is None
    clock_starts, start_clock = [], Run.start_clock
    monkeypatch.setattr(Run, "start_clock", lambda self: (clock_starts.append(self.global_step), start_clock(self)))
    assert run(script, "--resume", run_dir) == 0
    assert clock_starts == [200, 256]  # the speed is that of training
    result = summary(run_dir)
    assert (result["global_step"], result["interrupted"]) == (400, False)
    assert result["optimizer_steps"] == (200 - 48) // 8 + (400 - 200 - 48) // 8
    losses = [[value for key, value in row.items() if key.startswith("losses/")] for row in course(run_dir)]
    assert all(values == losses[199] for values in losses[199 : 200 + 48 + 7])
    assert losses[200 + 48 + 7] != losses[199]


@pytest.mark.parametrize("script", OFF_POLICY)
@pytest.mark.parametrize("num_envs, updates_per_step", [(3, 0.5), (4, 2.0)])
def test_updates_per_step_of_one_environment(script, tmp_path, num_envs, updates_per_step):
    flags = [f"--num-envs={num_envs}", f"--updates-per-step={updates_per_step}", "--total-timesteps=151"]
    result = summary(run_tiny(script, tmp_path, *flags))
    steps = 151 // num_envs * num_envs  # whole steps of all environments only
    assert (result["global_step"], result["num_envs"]) == (steps, num_envs)
    expected = int((steps - 48) * updates_per_step)
    assert expected == result["optimizer_steps"] >= 20
    # And that many were taken, by Adam's own count.
    state = newest_checkpoint(tmp_path / "run")[1]["script"]
    if script.startswith("dqn"):
        assert adam_steps(state["optimizer"]) == expected
    else:
        assert adam_steps(state["q_optimizer"]) == expected
        # SAC's actor is trained twice every second time, the others' once.
        assert adam_steps(state["actor_optimizer"]) == expected // 2 * (2 if script.startswith("sac") else 1)


def adam_steps(state: dict) -> int:
    return int(state["state"][0]["step"])


# ------------------------------------------------------------------------------------------------------------- REPLAY


# Some of their episodes end in a failure and some by the short time limit.
SHORT_HOPPER = EnvSpec("ShortHopper-v0", HopperEnv, max_episode_steps=14)
SHORT_CARTPOLE = EnvSpec("ShortCartPole-v0", CartPoleEnv, max_episode_steps=18)


@pytest.fixture
def stream(monkeypatch):
    """What went into the environments of a run and what came out, step by step."""
    stream = []
    reset, step = SerialVectorEnv.reset, SerialVectorEnv.step

    def recorded_reset(self, **kwargs):
        obs, infos = reset(self, **kwargs)
        stream.append((obs.copy(),))
        return obs, infos

    def recorded_step(self, actions):
        obs, *told = step(self, actions)
        stream.append((obs.copy(), np.array(actions), *(x.copy() for x in told[:3])))
        return obs, *told

    monkeypatch.setattr(SerialVectorEnv, "reset", recorded_reset)
    monkeypatch.setattr(SerialVectorEnv, "step", recorded_step)
    return stream


def replay_rows(run_dir) -> np.ndarray:
    """The replay of the newest checkpoint: obs, next_obs, action, reward, termination in a row."""
    return newest_checkpoint(run_dir)[1]["script"]["replay"]["rows"].numpy()


@pytest.mark.parametrize("script", OFF_POLICY)
def test_log_points_before_the_first_update(script, tmp_path):
    """They have no losses, which nothing computed yet, and a speed, also where the clock has just started again."""
    points = read_metrics(run_tiny(script, tmp_path, "--total-timesteps=96", "--log-every=1"))
    assert [point["global_step"] for point in points] == list(range(1, 97))
    for point in points:  # the first of the updates follows step 56
        assert any(key.startswith("losses/") for key in point) == (point["global_step"] >= 56)
        assert point["charts/SPS"] > 0


def test_a_fixed_alpha_is_logged_before_the_actor_trains(tmp_path):
    for script in (name for name in OFF_POLICY if "sac" in name):
        flags = ["--no-autotune", "--alpha=0.3", "--total-timesteps=60", "--log-every=1"]
        run_dir = run_tiny(script, tmp_path, *flags, name=script)
        assert read_metrics(run_dir)[-1]["losses/alpha"] == pytest.approx(0.3)
        assert summary(run_dir)["optimizer_steps"] == 1


@pytest.mark.parametrize("script", OFF_POLICY)
def test_the_replay_holds_what_happened(script, stream, tmp_path, monkeypatch):
    """All but the steps that only reset; where time ran out, the true last observation and no termination."""
    num_envs = 3
    env = SHORT_CARTPOLE if script.startswith("dqn") else SHORT_HOPPER
    monkeypatch.setitem(gym.registry, env.id, env)
    flags = [f"--env-id={env.id}", f"--num-envs={num_envs}", "--total-timesteps=600"]
    run_dir = run_tiny(script, tmp_path, *flags)
    rows = replay_rows(run_dir)

    ((last_obs,), *steps) = stream
    over = np.zeros(num_envs, bool)
    expected, counts = [], {"reset": 0, "termination": 0, "truncation": 0}
    for obs, actions, rewards, terminations, truncations in steps:
        for n in range(num_envs):
            if over[n]:
                counts["reset"] += 1
            else:
                expected.append(np.hstack([last_obs[n], obs[n], actions[n], rewards[n], float(terminations[n])]))
                counts["termination"] += terminations[n]
                counts["truncation"] += truncations[n] and not terminations[n]
        last_obs, over = obs, terminations | truncations
    assert min(counts.values()) > 3, counts
    assert len(rows) == 600 - counts["reset"]
    np.testing.assert_array_equal(rows, np.float32(expected))
    assert rows[:, -1].sum() == counts["termination"]
    assert summary(run_dir)["episodes"] == counts["termination"] + counts["truncation"]
    if script.startswith("fast_sac"):
        seen = np.concatenate([obs for obs, *_ in steps])
        mean = newest_checkpoint(run_dir)[1]["script"]["obs_rms"]["mean"]
        np.testing.assert_allclose(mean, seen.sum(0) / (len(seen) + 1e-4), rtol=1e-5)


@pytest.mark.parametrize("script", OFF_POLICY)
def test_targets_follow_the_trained_networks(script, tmp_path):
    """From the same start, by a part of the way."""
    # Of DQN (in steps) and SAC (in updates) the last step's is the first that moves targets.
    every = {"dq": ["--target-network-frequency=200"], "sa": ["--target-network-frequency=19"]}.get(script[:2], [])
    assert run_until(script, 30, *tiny(script), "--tau=0.5", *every, f"--runs-dir={tmp_path}", "--run-name=run") == 0
    before = newest_checkpoint(tmp_path / "run")[1]["script"]
    assert run(script, "--resume", tmp_path / "run", "--total-timesteps=200") == 0
    after = newest_checkpoint(tmp_path / "run")[1]["script"]
    target_of = {"critics": "critics_target", "actor": "actor_target", "q_network": "target_network"}
    assert not after.keys().isdisjoint(target_of.values())
    for name, target in ((name, target) for name, target in target_of.items() if target in after):
        assert leaves(before[name]) == leaves(before[target])
        assert leaves(after[name]) != leaves(before[name]) != leaves(after[target]) != leaves(after[name])
        for key, old in before[target].items() if every else ():
            torch.testing.assert_close(after[target][key], old.lerp(after[name][key], 0.5))


@pytest.mark.parametrize("script", OFF_POLICY)
def test_what_is_learned_decides_on_actions(script, tmp_path):
    """Two runs that learn at different rates act alike only before."""
    rate = "--policy-lr" if "sac" in script else "--learning-rate"
    flags = ["--total-timesteps=300", *(["--start-e=0", "--end-e=0"] if script.startswith("dqn") else [])]
    ours, theirs = (replay_rows(run_tiny(script, tmp_path, *flags, f"{rate}={x}", name=x)) for x in ("1e-4", "1e-2"))
    assert (ours[:45] == theirs[:45]).all() and not (ours[-50:] == theirs[-50:]).all()


@pytest.mark.parametrize("script", [script for script in OFF_POLICY if not script.startswith("dqn")])
def test_actions_reach_bounds_other_than_one(script, tmp_path):
    run_dir = run_tiny(script, tmp_path, "--env-id=InvertedPendulum-v5", "--total-timesteps=300")
    actions = replay_rows(run_dir)[:, 2 * 4]
    for part in (actions[:40], actions[-100:]):  # random ones, then the policy's
        assert 1.0 < np.abs(part).max() <= 3.0
