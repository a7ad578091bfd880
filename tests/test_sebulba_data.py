"""From the steps of an environment to what is learned from them: rollouts, targets and masks, number by number."""

import dataclasses
import traceback
from contextlib import closing

import numpy as np
import pytest
import torch
from scripts import newest_checkpoint, summary
from sebulba_runs import run_alone, tiny
from test_on_policy_targets import slow_gae
from test_sebulba_algorithms import slow_vtrace

import leanrl.cleanba_impala as impala
import leanrl.cleanba_ppo as ppo
from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.algorithm import Shards
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.params import ParamsSource
from leanrl.sebulba.rollout import Rollout
from leanrl.support.optim import FlatParameters
from leanrl.support.tracking import read_metrics

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------------- ROLLOUTS


def played_rollouts(args: ppo.Args, count: int) -> list[Rollout]:
    """The first rollouts of a run's only actor thread, whose parameters never change."""
    layout = Layout.of(args)
    pool = make_pool(args.env_id, layout.thread_envs(0, 0), args.seed, args.protocol)
    torch.manual_seed(0)
    agent = ppo.make_agent(pool.single_observation_space, int(pool.single_action_space.n), args)
    params = FlatParameters(agent).params
    source = ParamsSource(params, 0, args.policy_lag, args.timeout)
    told = (source, args, CPU, 0, count, lambda error, name: traceback.print_exception(error))
    thread = ActorThread("actor", layout.pieces_of_thread(0, 0), pool, agent, *told)
    thread.start()
    rollouts = []
    for number in range(1, count + 1):
        (rollout,) = thread.take("the test")
        rollouts.append(dataclasses.replace(rollout, **{name: x.clone() for name, x in vars(rollout).items()}))
        thread.give_back([rollout])
        source.publish(number, params)
    thread.join()
    return rollouts


@pytest.mark.parametrize("env_id, num_steps", [("Catch-v0", 19), ("MountainCar-v0", 200)])
def test_rollouts_tell_what_their_actions_did(env_id, num_steps):
    """Played once more: Catch terminates every tenth step, and MountainCar's time runs out after 200."""
    num_envs = 3
    args = ppo.Args(env_id=env_id, num_steps=num_steps, local_num_envs=num_envs, num_actor_threads=1, timeout=60)
    rollouts = played_rollouts(args, 2)
    with closing(make_pool(env_id, range(num_envs), args.seed, args.protocol)) as pool:
        obs, _ = pool.reset()
        resets, returns, lengths = np.zeros(num_envs, bool), np.zeros(num_envs), np.zeros(num_envs)
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


# ----------------------------------------------------------------------------------------------- TARGETS AND BATCHES


@pytest.fixture
def rollout() -> Rollout:
    """Environment 0 terminates with step 1, and environment 1 runs out of time with step 2; then they reset."""
    rollout = Rollout.allocate(6, 2, (4,), torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for x in (rollout.obs, rollout.values, rollout.rewards):
        x.copy_(torch.randn(x.shape, generator=generator))
    rollout.actions.copy_(torch.randint(3, rollout.actions.shape, generator=generator))
    rollout.logprobs.copy_(-1.0 + 0.1 * torch.randn(rollout.logprobs.shape, generator=generator))
    rollout.terminations[1, 0] = rollout.dones[1, 0] = rollout.dones[2, 1] = True
    rollout.resets[2, 0] = rollout.resets[3, 1] = True
    rollout.rewards[rollout.resets] = 0.0
    return rollout


def update_losses(module, rollout: Rollout, args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and values [T + 1, n] of an agent, and the losses of its only optimiser step on ``rollout``."""
    torch.manual_seed(1)
    agent = module.VectorAgent(4, 3)
    optimizer = module.make_optimizer(agent, args)
    with torch.no_grad():
        logits, values = agent(rollout.obs.flatten(0, 1))
        update = module.make_update(agent, optimizer, Shards([0], [rollout], 1, sum_in_order), args, CPU)
        return logits.view(7, 2, 3), values.view(7, 2), update.run(1)


def test_ppos_targets(rollout):
    args = ppo.Args(gamma=0.9, gae_lambda=0.8)
    batch = ppo.Batch.of(rollout)
    ppo.fill_targets(batch, lambda obs: obs.sum(1), args)
    values = torch.cat([rollout.values, rollout.obs[-1:].sum(2)])
    terminations, dones, live = rollout.terminations.float(), rollout.dones.float(), ~rollout.resets
    expected = slow_gae(rollout.rewards, values, terminations, dones, 0.9, 0.8)
    torch.testing.assert_close(batch.advantages[live], expected[live])
    torch.testing.assert_close(batch.returns[live], (expected + rollout.values)[live])
    assert torch.equal(batch.weights, live.float())
    # Mistakes that the numbers would show.
    for told in ((rollout.rewards, dones), (rollout.rewards.roll(1, 0), terminations)):
        wrong = slow_gae(told[0], values, told[1], dones, 0.9, 0.8)
        assert (wrong - expected)[live].abs().max() > 0.1

    obs, actions, logprobs, advantages, returns, weights = batch.minibatch(torch.tensor([5, 4, 11]))
    assert torch.equal(obs, torch.stack([rollout.obs[2, 1], rollout.obs[2, 0], rollout.obs[5, 1]]))
    assert weights.tolist() == [1.0, 0.0, 1.0]
    for rows, column in ((actions, rollout.actions), (logprobs, rollout.logprobs), (returns, batch.returns)):
        assert rows.tolist() == [column[2, 1], column[2, 0], column[5, 1]]
    assert advantages.tolist() == [batch.advantages[2, 1], batch.advantages[2, 0], batch.advantages[5, 1]]


def test_ppo_learns_from_live_steps_and_their_targets(rollout):
    args = ppo.Args(num_steps=6, num_envs=2, total_timesteps=12, num_minibatches=1, update_epochs=1, norm_adv=False)
    logits, values, losses = update_losses(ppo, rollout, args)
    live = ~rollout.resets
    told = torch.cat([rollout.values, values[-1:]])
    advantages = slow_gae(rollout.rewards, told, rollout.terminations, rollout.dones, args.gamma, args.gae_lambda)[live]
    newlogprob = logits[:-1].log_softmax(-1).gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    ratio = (newlogprob - rollout.logprobs).exp()[live]
    policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(0.9, 1.1)).mean()
    value_loss = 0.5 * ((values[:-1] - rollout.values)[live] - advantages).square().mean()
    torch.testing.assert_close(losses[:2], torch.stack([policy_loss, value_loss]))


def test_impalas_minibatch(rollout):
    obs, actions, logprobs, rewards, terminations, dones, weights = impala.minibatch(rollout, torch.tensor([1, 0]))
    assert torch.equal(obs, rollout.obs.flip(1))
    for column, whole in ((actions, rollout.actions), (logprobs, rollout.logprobs), (rewards, rollout.rewards)):
        assert torch.equal(column, whole.flip(1))
    # By step, environment 1 first.
    assert terminations.tolist() == [[0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert dones.tolist() == [[0, 0], [0, 1], [1, 0], [0, 0], [0, 0], [0, 0]]
    assert weights.tolist() == [[1, 1], [1, 1], [1, 0], [0, 1], [1, 1], [1, 1]]


def test_impala_learns_from_live_steps_and_their_targets(rollout):
    args = impala.Args(num_steps=6, num_envs=2, total_timesteps=12, num_minibatches=1)
    logits, values, losses = update_losses(impala, rollout, args)
    logprob = logits[:-1].log_softmax(-1).gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
    log_rhos, live = logprob - rollout.logprobs, ~rollout.resets

    def plain_losses(rewards: torch.Tensor, terminations: torch.Tensor) -> torch.Tensor:
        vs, advantages = slow_vtrace(log_rhos, rewards, values, terminations, rollout.dones, args.gamma, 1.0, 1.0)
        policy_loss = -(advantages * logprob)[live].sum()
        return torch.stack([policy_loss, 0.5 * (vs - values[:-1])[live].square().sum()]) / 12

    torch.testing.assert_close(losses[:2], plain_losses(rollout.rewards, rollout.terminations))
    # Mistakes that the numbers would show.
    for told in ((rollout.rewards, rollout.dones), (rollout.rewards.roll(1, 0), rollout.terminations)):
        assert (losses[:2] - plain_losses(*told)).abs().min() > 1e-3


# ------------------------------------------------------------------------------------------------------------- ATARI


@pytest.mark.parametrize("protocol, num_actions", [("cleanba", 18), ("cleanrl", 4)])
def test_breakouts_actions_are_the_protocols(protocol, num_actions):
    with closing(make_pool("Breakout-v5", range(2), 1, protocol)) as pool:
        assert pool.single_action_space.n == num_actions
        obs, _ = pool.reset()
        assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
        pool.step(np.full(2, num_actions - 1))


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
