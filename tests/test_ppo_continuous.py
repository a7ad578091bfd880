"""PPO for continuous actions: the fast variant acts and normalises as the reference does, in every mode."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from scripts import run_tiny
from test_envs import BOX, Custom
from test_on_policy_equality import OBS_DIM, in_every_mode, make_side, mode_args
from test_on_policy_targets import random_rollout

import leanrl.ppo_continuous_action as reference
import leanrl.ppo_continuous_action_torchcompile as fast
from leanrl.support.envs import make_envs
from leanrl.support.evaluation import load_model
from leanrl.support.normalization import RewardNormalizer, RunningMoments
from leanrl.support.optim import Adam

SCRIPT, NUM_ENVS, NUM_STEPS = "ppo_continuous_action", 2, 128


@pytest.mark.parametrize("num_envs", [1, 3])
@in_every_mode
def test_acting_equals_wrappers_and_reference_network(mode: str, num_envs: int) -> None:
    """NormalizeObservation, the clip, the policy and the sampled action, over calls enough to pass capture.

    Parameters that change are seen: there is no copy of them to go stale.
    """
    args, device = mode_args(SCRIPT, mode, num_envs=num_envs)
    plain = make_side(reference, torch.optim.Adam, args, torch.device("cpu")).network
    quick = make_side(fast, Adam, args, device)
    rollout, moments = quick.rollout, RunningMoments((OBS_DIM,)).to(device)
    low, high = np.array([-3.0, -0.4, -1.0], np.float32), np.array([3.0, 0.4, 1.0], np.float32)
    as_sums = mode == "compile" and num_envs == 1
    noise, row = torch.randn_like(rollout.actions), torch.zeros(1, dtype=torch.int64, device=device)
    *_, policy_step = fast.make_acting(quick.network, moments, rollout, noise, row, low, high, as_sums)
    rms = gym.wrappers.utils.RunningMeanStd(shape=(OBS_DIM,))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        policy_step, _ = fast.make_executables(policy_step, lambda inds: inds, args, device)
        for t in range(NUM_STEPS):
            if t == NUM_STEPS // 2:
                for network in (quick.network, plain):
                    for parameter in network.parameters():
                        parameter.mul_(1.5).add_(0.1)
            raw = rng.normal(size=(num_envs, OBS_DIM)) * 5 + 100
            action = policy_step(torch.from_numpy(raw).to(device)).cpu()
            rms.update(raw)
            obs = torch.as_tensor(np.clip((raw - rms.mean) / np.sqrt(rms.var + 1e-8), -10, 10), dtype=torch.float32)
            sampled = plain.actor_mean(obs) + plain.actor_logstd.exp() * noise[t].cpu()
            torch.testing.assert_close(rollout.obs[t].cpu(), obs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rollout.actions[t].cpu(), sampled, rtol=1e-5, atol=1e-5)
            clipped = sampled.clamp(torch.tensor(low), torch.tensor(high))
            torch.testing.assert_close(action, clipped, rtol=1e-5, atol=1e-5)
    assert row.item() == NUM_STEPS
    assert len(rollout.actions[:-1].unique(dim=0)) == NUM_STEPS, "samples repeat from call to call"
    torch.testing.assert_close(moments.var.cpu(), torch.from_numpy(rms.var), rtol=1e-9, atol=0)


def test_moments_are_float64_from_the_start_and_after_a_resume() -> None:
    """Of float32 observations too, Pendulum's: a resumed run normalises them as an uninterrupted one does."""

    def wrapped() -> tuple:
        raw = make_envs("Pendulum-v1", NUM_ENVS, seed=1)
        return raw, *reference.wrap_envs(raw, 0.99)

    raw, envs, *moments = wrapped()
    ours = RunningMoments((3,))
    actions = np.random.default_rng(0).uniform(-2, 2, (60, NUM_ENVS, 1)).astype(np.float32)
    envs.reset()
    ours.update(torch.from_numpy(raw._obs.astype(np.float64)))
    for action in actions[:30]:
        envs.step(action)
        ours.update(torch.from_numpy(raw._obs.astype(np.float64)))
        assert all(rms.mean.dtype == rms.var.dtype == np.float64 for rms in moments)
    assert raw._obs.dtype == np.float32
    torch.testing.assert_close(ours.mean, torch.from_numpy(moments[0].mean), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.var, torch.from_numpy(moments[0].var), rtol=1e-12, atol=0)

    resumed_raw, resumed, *resumed_moments = wrapped()
    resumed.reset()
    resumed_raw.load_state_dict(raw.state_dict())
    for rms, loaded in zip(moments, resumed_moments, strict=True):
        reference.load_rms_state(loaded, reference.rms_state(rms))
    for action in actions[30:]:
        np.testing.assert_array_equal(resumed.step(action)[0], envs.step(action)[0])
        assert all(rms.mean.dtype == rms.var.dtype == np.float64 for rms in resumed_moments)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_whole_numbers_are_observed_alike(dtype: type, tmp_path, monkeypatch) -> None:
    spaces = {"observation_space": gym.spaces.Box(0, 100, (3,), dtype), "action_space": BOX}
    monkeypatch.setitem(gym.registry, "LeanRLWhole-v0", EnvSpec("LeanRLWhole-v0", Custom, kwargs=spaces))
    flags, moments = ["--env-id=LeanRLWhole-v0", "--total-timesteps=256", "--save-model"], []
    for script in (SCRIPT, f"{SCRIPT}_torchcompile"):
        moments.append(load_model(run_tiny(script, tmp_path, *flags, name=script))["obs_rms"])
    ours, theirs = moments
    assert (ours["mean"] > 30).all()
    for name, value in ours.items():
        torch.testing.assert_close(value.flatten(), theirs[name].flatten(), rtol=1e-12, atol=0)


def test_a_finished_rollout_is_the_references() -> None:
    """Values and log-probabilities of every step in one batch: those that the reference writes step by step."""
    args, device = mode_args(SCRIPT, "eager")
    quick, plain = make_side(fast, Adam, args, device), make_side(reference, torch.optim.Adam, args, device)
    ours, theirs, agent = quick.rollout, plain.rollout, plain.network
    rewards, flags = torch.randn(NUM_STEPS, NUM_ENVS), (torch.rand(3, NUM_STEPS, NUM_ENVS) < 0.1).float()
    terminations, dones, resets = flags[0], flags[:2].amax(0), flags[2]
    with torch.no_grad():
        for t in range(NUM_STEPS + 1):
            theirs.values[t] = agent.get_value(theirs.obs[t])
            theirs.logprobs[t] = agent.get_policy(theirs.obs[t]).log_prob(theirs.actions[t]).sum(1)
    advantages = reference.compute_gae(rewards, theirs.values, terminations, dones, args.gamma, args.gae_lambda)
    fast.finish_rollout(quick.network, ours, lambda rewards, *_: rewards, rewards, terminations, dones, resets, args)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logprobs[:-1], theirs.logprobs[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.advantages[:-1], advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.returns[:-1], advantages + theirs.values[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.mask[:-1], 1 - resets)


class Script(gym.vector.VectorEnv):
    """Plays back given rewards and flags, in NEXT_STEP mode."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray) -> None:
        self.told, self.t, self.num_envs = (rewards, terminations, truncations), -1, rewards.shape[1]

    def reset(self, **kwargs):
        return np.zeros((self.num_envs, 1)), {}

    def step(self, actions):
        self.t += 1
        return np.zeros((self.num_envs, 1)), *(x[self.t].copy() for x in self.told), {}


def test_reward_normalizer_equals_gymnasiums_wrapper() -> None:
    """Over rollouts of several lengths, with terminations, truncations and the reset steps after them."""
    rewards, _, terminations, dones, resets = (x.numpy() for x in random_rollout(5, 300, 3))
    rewards = np.where(resets, 0.0, 3 * rewards + 1)
    wrapper = gym.wrappers.vector.NormalizeReward(Script(rewards, terminations > 0, dones > terminations), gamma=0.97)
    wrapper.reset()
    expected = np.stack([wrapper.step(None)[1] for _ in range(300)]).clip(-10, 10)
    normalize = RewardNormalizer(3, 0.97, torch.device("cpu"))
    pieces = [
        normalize(*(torch.as_tensor(x[a:b], dtype=torch.float32) for x in (rewards, terminations, 1.0 - resets)))
        for a, b in ((0, 1), (1, 128), (128, 130), (130, 300))
    ]
    # Gymnasium sums the discounted return in float32.
    torch.testing.assert_close(torch.cat(pieces), torch.as_tensor(expected, dtype=torch.float32), rtol=2e-5, atol=1e-6)
