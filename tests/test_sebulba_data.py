"""From the steps of an environment to what is learned from them: rollouts, targets and masks, number by number."""

import traceback
from contextlib import closing

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from scripts import newest_checkpoint, summary
from sebulba_runs import ALONE, run_alone, tiny
from test_on_policy_targets import slow_gae
from test_sebulba_algorithms import slow_vtrace

import leanrl.cleanba_impala as impala
import leanrl.cleanba_ppo as ppo
from leanrl.sebulba.actor import ActingAgent, ActorThread, flatten
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.rollout import Rollout
from leanrl.sebulba.start import resolve_start
from leanrl.support.normalization import RunningMoments
from leanrl.support.optim import Adam, RMSprop
from leanrl.support.tracking import read_metrics

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------------- ROLLOUTS


def played_rollouts(monkeypatch, module, env_id: str, backend: str, num_steps: int, count: int) -> tuple:
    """The first rollouts of a run's only actor thread, whose parameters never change; and its 3 environments anew."""
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    sizes = {"num_steps": num_steps, "local_num_envs": 3, "num_actor_threads": 1}
    args = module.Args(env_id=env_id, env_backend=backend, total_timesteps=count * 3 * num_steps, timeout=60, **sizes)
    start = resolve_start(args)
    agent = module.make_agent(start.space, start.action_space, args)
    acting, fail = ActingAgent(agent, args.amp), lambda error, name: traceback.print_exception(error)
    thread = ActorThread(start, 0, acting, 0, fail)
    thread.start(module.play, module.make_act(acting, args), args)
    rollouts = []
    for number in range(1, count + 1):
        (rollout,) = thread.take()
        rollouts.append(Rollout(*(x.clone() for x in rollout)))
        thread.give_back([rollout])
        thread.put_params(number, flatten(agent))
    thread.join(60)
    return rollouts, closing(make_pool(env_id, range(3), args.seed, args.protocol, backend))


@pytest.mark.parametrize(
    "env_id, num_steps, backend",
    [("Catch-v0", 19, "envpool"), ("MountainCar-v0", 200, "envpool"), ("MountainCar-v0", 200, "gymnasium")],
)
@pytest.mark.parametrize("module", [ppo, impala])
def test_rollouts_tell_what_their_actions_did(monkeypatch, module, env_id, num_steps, backend):
    """Played once more: Catch terminates every tenth step, and MountainCar's time runs out after 200."""
    rollouts, envs = played_rollouts(monkeypatch, module, env_id, backend, num_steps, 2)
    with envs as pool:
        obs, _ = pool.reset()
        resets, returns, lengths = np.zeros(3, bool), np.zeros(3), np.zeros(3)
        for rollout in rollouts:
            for t in range(num_steps):
                assert np.array_equal(rollout.obs[t], obs)
                obs, rewards, terminations, truncations, _ = pool.step(rollout.actions[t].numpy())
                dones = terminations | truncations
                assert np.array_equal(rollout.rewards[t], rewards) and not rewards[resets].any()
                assert np.array_equal(rollout.terminations[t], terminations)
                assert np.array_equal(rollout.dones[t], dones)
                assert np.array_equal(rollout.resets[t], resets)
                returns, lengths = returns + rewards, lengths + ~resets
                for told, counted in ((rollout.returns[t], returns), (rollout.lengths[t], lengths)):
                    np.testing.assert_array_equal(told, np.where(dones, counted, np.nan))
                returns[dones] = lengths[dones] = 0
                resets = dones
            assert np.array_equal(rollout.obs[num_steps], obs)
    first, second = rollouts
    for rollout in rollouts:
        assert torch.equal(rollout.resets[1:], rollout.dones[:-1])
    assert torch.equal(second.resets[0], first.dones[-1]) and torch.equal(second.obs[0], first.obs[-1])
    # Episodes end with the first rollout's last step.
    assert first.dones[-1].any() and first.terminations.any() == (env_id == "Catch-v0")


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
def test_continuous_actions_are_clipped_for_the_environment_only(monkeypatch, backend):
    """Pendulum's torque, within -2 and 2, is sampled around 0; time runs out after 200 steps."""
    (rollout,), envs = played_rollouts(monkeypatch, ppo, "Pendulum-v1", backend, 210, 1)
    assert 0.01 < (rollout.actions.abs() > 2).float().mean() < 0.1  # of a normal distribution 0.045
    with envs as pool:
        obs, _ = pool.reset()
        for t in range(210):
            assert np.array_equal(rollout.obs[t], obs)
            obs, rewards, _, truncations, _ = pool.step(rollout.actions[t].numpy().clip(-2, 2))
            assert np.array_equal(rollout.rewards[t], rewards.astype(np.float32))
            assert truncations.all() == (t == 199) and np.array_equal(rollout.dones[t], truncations)


# ----------------------------------------------------------------------------------------------- TARGETS AND BATCHES


@pytest.fixture
def rollout() -> Rollout:
    """Environment 0 terminates with step 1, and environment 1 runs out of time with step 2; then they reset."""
    rollout = Rollout.allocate(Box(-1, 1, (4,)), Discrete(3), 6, 2, CPU)
    generator = torch.Generator().manual_seed(0)
    for x in (rollout.obs, rollout.values, rollout.rewards):
        x.copy_(torch.randn(x.shape, generator=generator))
    rollout.actions.copy_(torch.randint(3, rollout.actions.shape, generator=generator))
    rollout.logprobs.copy_(-1.0 + 0.1 * torch.randn(rollout.logprobs.shape, generator=generator))
    rollout.terminations[1, 0] = rollout.dones[1, 0] = rollout.dones[2, 1] = True
    rollout.resets[2, 0] = rollout.resets[3, 1] = True
    rollout.rewards[rollout.resets] = 0.0
    return rollout


def network(module, rollout: Rollout) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """An agent, and what it says of a rollout: logits and values [T + 1, n]."""
    torch.manual_seed(1)
    agent = module.VectorAgent(4, 3)
    logits, values = agent(rollout.obs.flatten(0, 1))
    return agent, logits.detach().view(7, 2, 3), values.detach().view(7, 2)


def test_ppo_learns_from_live_steps_and_their_targets(rollout):
    args = ppo.Args(num_steps=6, num_envs=2, total_timesteps=12, num_minibatches=1, update_epochs=1, norm_adv=False)
    agent, logits, values = network(ppo, rollout)
    batch = ppo.Batch.of(rollout)
    gradients, step = ppo.make_update(agent, Adam(agent.parameters(), args.learning_rate), [batch], args)
    ppo.fill_targets(batch, rollout, args)
    told = {"obs": rollout.obs, "actions": rollout.actions, "logprobs": rollout.logprobs, "mask": ~rollout.resets}
    for name, rows in batch.minibatch(torch.tensor([5, 4, 11]))._asdict().items():
        column = told.get(name, getattr(batch, name))
        assert torch.equal(rows, torch.stack([column[2, 1], column[2, 0], column[5, 1]]).to(rows.dtype)), name

    losses = ppo.train_epoch([torch.randperm(12)], gradients, step, sum_in_order, args)
    live = ~rollout.resets
    newlogprob = logits[:-1].log_softmax(-1).gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    ratio = (newlogprob - rollout.logprobs).exp()[live]

    def plain_losses(rewards: torch.Tensor, terminations: torch.Tensor) -> torch.Tensor:
        advantages = slow_gae(rewards, rollout.values, terminations, rollout.dones, args.gamma, args.gae_lambda)[live]
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(0.9, 1.1)).mean()
        value_loss = 0.5 * ((values - rollout.values)[:-1][live] - advantages).square().mean()
        return torch.stack([policy_loss, value_loss])

    torch.testing.assert_close(losses[:2], plain_losses(rollout.rewards, rollout.terminations))
    # Mistakes that the numbers would show.
    for told in ((rollout.rewards, rollout.dones), (rollout.rewards.roll(1, 0), rollout.terminations)):
        assert (losses[:2] - plain_losses(*told)).abs().min() > 1e-3


def test_large_constants_have_no_negative_variance():
    """Of the first batch, both terms of the variance are as large as the squares, and their rounding errors too."""
    moments, values = RunningMoments((1000,), count=0.0), torch.logspace(3, 7, 1000, dtype=torch.float64)
    moments.update(values.expand(96, -1))
    assert moments(values).isfinite().all()


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """Of two shards, over two rollouts, step by step; what only resets an environment does not count."""
    generator, gamma, moments = torch.Generator().manual_seed(0), 0.9, RunningMoments((1,), count=0.0)
    rollouts = [Rollout.allocate(Box(-1, 1, (4,)), Discrete(3), 30, 2, CPU) for _ in range(2)]
    discounted = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    carried, counted = np.zeros(4), []
    for _ in range(2):
        for rollout in rollouts:
            rollout.rewards.copy_(3 + 5 * torch.randn(rollout.rewards.shape, generator=generator))
            rollout.resets.copy_(torch.rand(rollout.resets.shape, generator=generator) < 0.1)
            rollout.rewards[rollout.resets] = 0.0
        rewards = np.concatenate([rollout.rewards.numpy() for rollout in rollouts], 1)
        resets = np.concatenate([rollout.resets.numpy() for rollout in rollouts], 1)
        for t in range(30):
            carried = np.where(resets[t], 0.0, rewards[t] + gamma * carried)
            counted += carried[~resets[t]].tolist()
        ppo.scale_rewards(moments, rollouts, discounted, sum_in_order, gamma)
        scaled = np.concatenate([rollout.rewards.numpy() for rollout in rollouts], 1)
        np.testing.assert_allclose(scaled, (rewards / np.std(counted)).clip(-10, 10), rtol=1e-4)
    np.testing.assert_allclose(torch.cat(discounted), carried)
    assert resets.any() and len(counted) > 200


def test_impala_learns_from_live_steps_and_their_targets(rollout):
    batch = impala.take_minibatch(rollout, torch.tensor([1, 0]))
    for name in ("obs", "actions", "logprobs", "rewards", "terminations", "dones"):
        ours = getattr(batch, name)
        assert torch.equal(ours, getattr(rollout, name).flip(1).to(ours.dtype)), name
    assert batch.mask.tolist() == [[1, 1], [1, 1], [1, 0], [0, 1], [1, 1], [1, 1]]

    args = impala.Args(num_steps=6, num_envs=2, total_timesteps=12, num_minibatches=1)
    agent, logits, values = network(impala, rollout)
    gradients, step = impala.make_update(agent, RMSprop(agent.parameters(), args.learning_rate), [rollout], args)
    logprob = logits[:-1].log_softmax(-1).gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    log_rhos, live = logprob - rollout.logprobs, ~rollout.resets

    def plain_losses(rewards: torch.Tensor, terminations: torch.Tensor) -> torch.Tensor:
        vs, advantages = slow_vtrace(log_rhos, rewards, values, terminations, rollout.dones, args.gamma, 1.0, 1.0)
        policy_loss = -(advantages * logprob)[live].sum()
        return torch.stack([policy_loss, 0.5 * (vs - values[:-1])[live].square().sum()]) / 12

    # The gradient, of targets that are constants.
    flags = rollout.terminations, rollout.dones
    vs, advantages = slow_vtrace(log_rhos, rollout.rewards, values, *flags, args.gamma, 1.0, 1.0)
    newlogits, newvalues = agent(rollout.obs.flatten(0, 1))
    logprobs = newlogits.view(7, 2, 3)[:-1].log_softmax(-1)
    newlogprob = logprobs.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    entropy, v_losses = -(logprobs.exp() * logprobs).sum(-1), 0.5 * (vs - newvalues.view(7, 2)[:-1]) ** 2
    loss = (-advantages * newlogprob - args.ent_coef * entropy + args.vf_coef * v_losses)[live].sum()
    expected = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(agent.parameters()))])
    torch.testing.assert_close(gradients[0](torch.tensor([0, 1]))[:-3], expected)

    losses = impala.train(torch.tensor([[[0, 1]]]), gradients, step, sum_in_order)
    torch.testing.assert_close(losses[:2], plain_losses(rollout.rewards, rollout.terminations))
    # Mistakes that the numbers would show.
    for told in ((rollout.rewards, rollout.dones), (rollout.rewards.roll(1, 0), rollout.terminations)):
        assert (losses[:2] - plain_losses(*told)).abs().min() > 1e-3


# ------------------------------------------------------------------------------------------------------------- ATARI


@pytest.mark.parametrize("protocol, num_actions", [("cleanba", 18), ("cleanrl", 4)])
def test_breakout_is_learned_from(monkeypatch, tmp_path, protocol, num_actions):
    flags = ["--env-id=Breakout-v5", f"--protocol={protocol}", "--torso=nature", "--local-num-envs=2"]
    flags += ["--num-actor-threads=1", "--num-steps=8", "--update-epochs=1", "--total-timesteps=32"]
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, *flags)) == 0
    run_dir = tmp_path / "run"
    assert summary(run_dir)["optimizer_steps"] == 2 * 2
    first, second = read_metrics(run_dir)
    # A fresh policy chooses among all actions alike.
    assert first["losses/entropy"] == pytest.approx(np.log(num_actions), rel=1e-3)
    assert first["losses/value_loss"] > 0 and second["losses/value_loss"] > 0
    agent = newest_checkpoint(run_dir)[1]["script"]["agent"]
    assert agent["torso.0.weight"].shape == (32, 4, 8, 8) and agent["actor.weight"].shape == (num_actions, 512)
