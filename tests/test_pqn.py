"""PQN: whole rollouts against slow transcriptions; the fast variant makes the run that the reference makes."""

import importlib
from copy import deepcopy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from scripts import course, run_tiny
from test_on_policy_equality import (
    NUM_ACTIONS,
    OBS_DIM,
    in_every_mode,
    make_side,
    minibatches,
    mode_args,
    random_frames,
)
from test_on_policy_targets import slow_returns

import leanrl.pqn_atari_envpool as pqn_atari
import leanrl.pqn_atari_envpool_torchcompile as fast_pqn_atari
import leanrl.pqn_torchcompile as fast
from leanrl.support.optim import Adam


@pytest.fixture
def short_cartpole():
    """CartPole whose episodes have 20 steps at most: some terminate, some are truncated."""
    gym.register("LeanRLShortCartPole-v0", CartPoleEnv, max_episode_steps=20)
    yield "LeanRLShortCartPole-v0"
    gym.registry.pop("LeanRLShortCartPole-v0")


@pytest.mark.parametrize("script", ["pqn", "pqn_torchcompile"])
@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_a_run_trains_on_what_happened(script, epsilon, short_cartpole, tmp_path, monkeypatch):
    """Each rollout beside a record of the environments' steps: weights, returns, and who explored."""
    module, num_steps, num_envs = importlib.import_module(f"leanrl.{script}"), 16, 3
    make_envs, finish_rollout = module.make_envs, module.finish_rollout
    record, seen = [], {"resets": 0, "truncated": 0, "terminated": 0, "rollouts": 0, "explored": 0}

    def make_recorded_envs(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        step = envs.step

        def recorded_step(actions):
            resets, before = np.array(envs._done), envs._obs.copy()
            result = step(actions)
            record.append((before, actions.copy(), *(x.copy() for x in result[:4]), resets))
            return result

        envs.step = recorded_step
        return envs

    def checked_finish_rollout(q_network, rollout, *outcome):
        finish_rollout(q_network, rollout, *outcome)
        columns = (torch.as_tensor(np.stack(column)) for column in zip(*record, strict=True))
        obs, actions, next_obs, rewards, terminated, truncated, resets = columns
        assert len(record) == num_steps
        record.clear()
        assert torch.equal(rollout.obs[:-1], obs) and torch.equal(rollout.obs[-1], next_obs[-1])
        assert torch.equal(rollout.actions[:-1], actions)
        assert torch.equal(rollout.weights[:-1] == 0, resets)
        exact = deepcopy(q_network).double().requires_grad_(False)
        next_values = exact(next_obs.double()).amax(-1)
        values = torch.cat([next_values[:1], next_values])  # the first is not asked for
        expected = slow_returns(rewards, values, terminated, terminated | truncated, 0.97, 0.8)
        torch.testing.assert_close(rollout.returns[:-1][~resets].double(), expected[~resets], rtol=1e-4, atol=1e-4)
        seen["explored"] += (actions != exact(obs.double()).argmax(-1)).sum().item()
        for name, flags in (("resets", resets), ("truncated", truncated), ("terminated", terminated)):
            seen[name] += flags.sum().item()
        seen["rollouts"] += 1

    monkeypatch.setattr(module, "make_envs", make_recorded_envs)
    monkeypatch.setattr(module, "finish_rollout", checked_finish_rollout)
    flags = [f"--env-id={short_cartpole}", f"--num-envs={num_envs}", f"--num-steps={num_steps}", "--gamma=0.97"]
    flags += ["--q-lambda=0.8", f"--start-e={epsilon}", f"--end-e={epsilon}", "--total-timesteps=960"]
    run_tiny(script, tmp_path, *flags, "--learning-rate=1e-3")
    assert seen["rollouts"] == 20
    assert min(seen[name] for name in ("resets", *(["truncated", "terminated"] if epsilon else []))) > 5
    # Half of what explores does what is best.
    assert 0.35 * 960 < seen["explored"] < 0.45 * 960 if epsilon else seen["explored"] == 0


@pytest.mark.parametrize("script, mode", [("pqn", []), ("pqn", ["--compile"]), ("pqn_atari_envpool", [])])
def test_both_make_the_same_run(script, mode, tmp_path):
    """Apart from rounding, which decides no action here: all are random, and the same."""
    sizes = ["--total-timesteps=256"] if "atari" in script else ["--num-envs=2", "--total-timesteps=1280"]
    flags = [*sizes, "--start-e=1", "--end-e=1"]
    theirs = course(run_tiny(script, tmp_path, *flags, name="plain"))
    ours = course(run_tiny(f"{script}_torchcompile", tmp_path, *flags, *mode, name="quick"))
    assert len(ours) >= 4 and [row.keys() for row in ours] == [row.keys() for row in theirs]
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert our_row == pytest.approx(their_row, rel=1e-3)


@pytest.mark.parametrize("module", [pqn_atari, fast_pqn_atari], ids=["reference", "fast"])
def test_a_saved_policy_on_atari_explores_one_step_in_twenty(module):
    torch.manual_seed(0)
    network = module.QNetwork(6)
    spaces = SimpleNamespace(single_action_space=gym.spaces.Discrete(6))
    policy = module.load_policy({"q_network": network.state_dict()}, spaces)
    best = network(random_frames(1)).argmax().item()
    assert 0.015 < (policy(random_frames(1).expand(600, -1, -1, -1).numpy()) != best).mean() < 0.08


@pytest.mark.parametrize("num_envs", [1, 5, 40])
@in_every_mode
def test_the_best_actions_are_the_references_after_every_update(mode: str, num_envs: int) -> None:
    """As sums and as products; there is no copy of the parameters to go stale."""
    args, device = mode_args("pqn", mode, num_envs=num_envs, learning_rate=1e-2)
    quick = make_side(fast, Adam, args, device)
    best_actions, update = fast.make_executables(quick.network, quick.update, args, device)
    chosen = set()
    for inds in minibatches(args, device, 10):
        obs = torch.randn(num_envs, OBS_DIM, device=device)
        values = quick.network(obs).detach()
        actions = best_actions(obs)
        # Where two actions are as good but for rounding, either is best.
        torch.testing.assert_close(values.gather(1, actions.unsqueeze(1)).squeeze(1), values.amax(1))
        chosen |= set(actions.tolist())
        update(inds)
    assert chosen == set(range(NUM_ACTIONS))
