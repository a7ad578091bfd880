"""PPO's and PQN's targets and losses against slow transcriptions; the fast variants have them in the same words."""

import importlib
import math
from copy import deepcopy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from scripts import ATARI, ON_POLICY, ON_POLICY_REFERENCES, PPO, run_tiny, summary, tiny_env, with_long
from test_off_policy_targets import product, rounded
from torch.distributions import Categorical

import leanrl.dqn as dqn
import leanrl.ppo_atari_envpool as ppo_atari
import leanrl.ppo_continuous_action as ppo
import leanrl.pqn as pqn
import leanrl.pqn_atari_envpool as pqn_atari
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.normalization import RewardNormalizer

# ----------------------------------------------------------------------------------------------------------- TARGETS


def slow_gae(rewards, values, terminations, dones, gamma, gae_lambda):
    """Equation 16 of https://arxiv.org/abs/1506.02438, a sum for each step: no sum goes on beyond an episode's end."""
    advantages = torch.zeros_like(rewards)
    num_steps, num_envs = rewards.shape
    for n in range(num_envs):
        for t in range(num_steps):
            factor = 1.0
            for k in range(t, num_steps):
                next_value = 0.0 if terminations[k, n] else values[k + 1, n]
                advantages[t, n] += factor * (rewards[k, n] + gamma * next_value - values[k, n])
                if dones[k, n]:
                    break
                factor *= gamma * gae_lambda
    return advantages


def slow_returns(rewards, values, terminations, dones, gamma, q_lambda):
    """Peng's Q(lambda) step by step from the last to the first, each environment by itself."""
    returns = torch.zeros_like(rewards)
    num_steps, num_envs = rewards.shape
    for n in range(num_envs):
        for t in reversed(range(num_steps)):
            if terminations[t, n]:
                returns[t, n] = rewards[t, n]
            elif dones[t, n] or t == num_steps - 1:
                returns[t, n] = rewards[t, n] + gamma * values[t + 1, n]
            else:
                mixed = q_lambda * returns[t + 1, n] + (1 - q_lambda) * values[t + 1, n]
                returns[t, n] = rewards[t, n] + gamma * mixed
    return returns


def random_rollout(seed, num_steps=40, num_envs=5):
    """Rewards, values, terminations, dones and resets, as NEXT_STEP environments give them."""
    generator = torch.Generator().manual_seed(seed)
    dones = torch.rand(num_steps, num_envs, generator=generator) < 0.2
    for t in range(1, num_steps):
        dones[t] &= ~dones[t - 1]  # the step after a done only resets
    resets = torch.cat([torch.zeros_like(dones[:1]), dones[:-1]])
    terminations = dones & (torch.rand(dones.shape, generator=generator) < 0.5)
    rewards = torch.randn(dones.shape, generator=generator, dtype=torch.float64).masked_fill(resets, 0.0)
    values = torch.randn(num_steps + 1, num_envs, generator=generator, dtype=torch.float64)
    return rewards, values, terminations.double(), dones.double(), resets


@pytest.fixture(params=[*ON_POLICY_REFERENCES, "cleanba_ppo"])
def targets(request):
    """A script's function, and its transcription."""
    module = importlib.import_module(f"leanrl.{request.param}")
    return (module.compute_gae, slow_gae) if "ppo" in request.param else (module.lambda_returns, slow_returns)


@pytest.mark.parametrize("gamma, trace", [(0.99, 0.95), (0.99, 0.65), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_targets_equal_the_transcription(targets, gamma, trace):
    ours, slow = targets
    for seed in range(3):
        *rollout, _ = random_rollout(seed)
        assert rollout[2].sum() > 5 and (rollout[3] - rollout[2]).sum() > 5
        expected = slow(*rollout, gamma, trace)
        torch.testing.assert_close(ours(*rollout, gamma, trace), expected, rtol=1e-10, atol=1e-12)


def test_targets_by_hand(targets):
    # gamma 0.5, lambda 0.5. No end; the middle step terminates; the middle step is truncated.
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 3)
    values = torch.tensor([[4.0], [8.0], [12.0], [16.0]], dtype=torch.float64).expand(4, 3)
    terminations = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64)
    dones = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.float64)
    if targets[1] is slow_gae:
        # Deltas without an end: 1 + 4 - 4 = 1, 2 + 6 - 8 = 0, 3 + 8 - 12 = -1. Terminated, the second is 2 - 8 = -6.
        expected = [[1 - 1 / 16, 1 - 6 / 4, 1], [0 - 1 / 4, -6, 0], [-1, -1, -1]]
    else:
        last = 3 + 16 / 2
        middle = [2 + (last + 12) / 4, 2, 2 + 12 / 2]
        expected = [[1 + (x + 8) / 4 for x in middle], middle, [last] * 3]
    ours = targets[0](rewards, values, terminations, dones, 0.5, 0.5)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("script", [script for script in ON_POLICY if script not in ATARI])
def test_what_is_learned_is_what_environments_told(script, tmp_path, monkeypatch):
    """Through main(), with episodes that terminate or end after 20 steps; each epoch shuffles the whole batch anew."""
    module, told, given, updates = importlib.import_module(f"leanrl.{script}"), [], [], []
    monkeypatch.setattr(gym.spec(tiny_env(script)), "max_episode_steps", 20)

    def watch(name, see):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: see(function(*args, **kwargs), args))

    def see_envs(envs, args):
        step = envs.step
        envs.step = lambda actions: told.append((np.array(actions), *deepcopy(step(actions)))) or told[-1][1:]
        return envs

    def see_update(update, args):
        def seen(rollout) -> list[torch.Tensor]:
            return [x.clone() for x in (rollout.mask[:-1], rollout.obs, rollout.actions[:-1])]

        return lambda inds: updates.append((inds.clone(), *seen(args[2]))) or update(inds)

    watch("make_envs", see_envs)
    watch("make_update", see_update)
    targets = "compute_gae" if "ppo" in script else "lambda_returns"
    watch(targets, lambda found, args: given.append([x.clone() for x in (*args[2:4], args[0])]) or found)
    run_dir = run_tiny(script, tmp_path, "--num-envs=2", "--num-steps=8", "--update-epochs=2", "--total-timesteps=1024")
    actions, _, *outcome, _ = zip(*told, strict=True)
    rewards, terminations, truncations = torch.from_numpy(np.array(outcome)).float()
    dones = terminations.maximum(truncations)
    resets = torch.cat([torch.zeros(1, 2), dones[:-1]])
    assert terminations.any() and truncations.any() and dones[7:-1:8].any()
    *ends, learned = map(torch.cat, zip(*given, strict=True))
    assert all(map(torch.equal, ends, (terminations, dones)))
    inds, mask, obs, chosen = zip(*updates[-512:], strict=True)  # 64 rollouts, 2 epochs, 4 minibatches
    assert torch.equal(torch.cat(mask[::8]), 1 - resets)
    obs, chosen = torch.stack(obs[::8]), torch.cat(chosen[::8])
    assert torch.equal(obs[1:, 0], obs[:-1, -1])
    returns, _ = EpisodeStatistics(2).add(rewards.numpy(), dones.numpy() > 0, resets.numpy() > 0)
    assert summary(run_dir)["episodic_return"] == pytest.approx(returns[-100:].mean(), rel=1e-5)
    if "ppo" in script:  # clipped for the environment alone
        assert (chosen.abs() > 1).any()
        chosen, normalize = chosen.clamp(-1, 1), RewardNormalizer(2, 0.99, torch.device("cpu"))
        rewards = normalize(rewards, terminations, 1 - resets)
    assert np.array_equal(chosen, np.array(actions))
    torch.testing.assert_close(learned, rewards, rtol=1e-4, atol=1e-5)
    orders = torch.cat(inds).view(128, 16)
    assert torch.equal(orders.sort(1).values, torch.arange(16).expand(128, 16)) and len(orders.unique(dim=0)) == 128


# --------------------------------------------------------------------------------------------------- PPO'S LOSS


def slow_mlp(network, x):
    """Two hidden layers with tanh, in bf16 under autocast, and a product that is not."""
    for layer in (network[0], network[2]):
        x = rounded(torch.tanh(rounded(product(rounded(x), rounded(layer.weight.t())) + rounded(layer.bias))))
    return product(x, network[4].weight.t()) + network[4].bias


def slow_logprobs(agent, obs, actions):
    """Log-density of a Gaussian of each number, by its formula."""
    z = (actions - slow_mlp(agent.actor_mean, obs)) / agent.actor_logstd.exp()
    return (-0.5 * z**2 - agent.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)


def test_networks_in_either_precision():
    """Under autocast the last layers stay float32."""
    torch.manual_seed(0)
    agent, obs = ppo.Agent(11, 3), torch.randn(64, 11)
    for network in (agent.critic, agent.actor_mean):
        network[4].weight.data.normal_()
    for amp in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            policy, values = agent.get_policy(obs), agent.get_value(obs)
            slow_values, slow_means = slow_mlp(agent.critic, obs).squeeze(1), slow_mlp(agent.actor_mean, obs)
        # Where sums in another order round to the other side, a hidden unit is off by 2**-8.
        tolerance = dict(rtol=0, atol=0.02 if amp else 1e-5)
        torch.testing.assert_close(values, slow_values, **tolerance)
        torch.testing.assert_close(policy.mean, slow_means, **tolerance)
        if amp:  # so a network that does not round would be seen
            for network, outputs in ((agent.critic, values.unsqueeze(1)), (agent.actor_mean, policy.mean)):
                assert (slow_mlp(network, obs) - outputs).abs().max() > 0.03
        assert values.dtype == policy.mean.dtype == torch.float32
        assert (values != values.bfloat16()).float().mean() > 0.9


def gaussian_case(dtype=torch.float64):
    """``(agent, minibatch, parameters, outputs)`` of the agent for a minibatch with ratios around the clip range.

    The outputs are what the loss needs: new log-probabilities, entropies and values [B], here slowly computed. Values
    are near 100, where bf16 has steps of 0.5: a loss that is rounded to it would be seen.
    """
    torch.manual_seed(0)
    agent, obs = ppo.Agent(11, 3).to(dtype), torch.randn(64, 11, dtype=dtype)
    agent.critic[4].bias.data += 100
    actions = agent.get_policy(obs).sample()
    newvalues, newlogprobs = slow_mlp(agent.critic, obs).squeeze(1), slow_logprobs(agent, obs, actions)
    entropies = (agent.actor_logstd + 0.5 + 0.5 * math.log(2 * math.pi)).sum(1).expand(64)
    minibatch = ppo.Minibatch(obs, actions, *random_columns(newlogprobs.detach(), newvalues.detach()))
    return agent, minibatch, list(agent.parameters()), (newlogprobs, entropies, newvalues)


def categorical_case(dtype=torch.float64):
    """As ``gaussian_case``, with outputs instead of a network."""
    torch.manual_seed(0)
    logits, newvalues = (x.to(dtype).requires_grad_() for x in (torch.randn(64, 4), 100 + torch.randn(64)))
    actions = torch.randint(0, 4, (64,))
    chances = logits.exp() / logits.exp().sum(1, keepdim=True)
    newlogprobs, entropies = chances[range(64), actions].log(), -(chances * chances.log()).sum(1)
    obs = torch.zeros(64)
    minibatch = ppo_atari.Minibatch(obs, actions, *random_columns(newlogprobs.detach(), newvalues.detach()))
    agent = lambda obs: (Categorical(logits=logits), newvalues)  # noqa: E731
    return agent, minibatch, [logits, newvalues], (newlogprobs, entropies, newvalues)


def random_columns(newlogprobs, newvalues):
    """Old log-probabilities, advantages, returns, old values and mask."""
    noise = torch.randn(4, len(newvalues), dtype=newvalues.dtype)
    mask = (torch.rand(len(newvalues)) > 0.2).to(newvalues.dtype)
    return newlogprobs + 0.3 * noise[0], 2 + 3 * noise[1], newvalues + noise[2], newvalues + 0.3 * noise[3], mask


def slow_losses(outputs, batch, args):
    """https://arxiv.org/abs/1707.06347, equations 7 and 9, row for row, over the rows where the mask is 1."""
    rows = [i for i in range(len(batch.mask)) if batch.mask[i] == 1]
    advantages = {i: batch.advantages[i] for i in rows}
    if args.norm_adv:
        mean = sum(advantages.values()) / len(rows)
        deviation = (sum((a - mean) ** 2 for a in advantages.values()) / (len(rows) - 1)).sqrt()
        advantages = {i: (a - mean) / (deviation + 1e-8) for i, a in advantages.items()}
    sums = dict.fromkeys(ppo.Losses._fields, 0.0)
    for i, newlogprob, entropy, new in ((i, *(column[i] for column in outputs)) for i in rows):
        ratio = (newlogprob - batch.logprobs[i]).exp()
        clipped = min(max(ratio, 1 - args.clip_coef), 1 + args.clip_coef)
        error = (new - batch.returns[i]) ** 2
        if args.clip_vloss:
            old = batch.values[i]
            kept = new if abs(new - old) < args.clip_coef else old + args.clip_coef * torch.sign(new - old)
            error = max(error, (kept - batch.returns[i]) ** 2)
        sums["policy_loss"] += -min(ratio * advantages[i], clipped * advantages[i])
        sums["value_loss"] += error / 2
        sums["entropy"] += entropy
        sums["old_approx_kl"] += -ratio.log()
        sums["approx_kl"] += ratio - 1 - ratio.log()
        sums["clipfrac"] += float(clipped != ratio)
    return ppo.Losses(*(total / len(rows) for total in sums.values()))


def assert_same_gradients(loss, expected, parameters, amp):
    ours, theirs = (torch.cat([g.flatten() for g in torch.autograd.grad(x, parameters)]) for x in (loss, expected))
    if amp:
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
@pytest.mark.parametrize("module, case", [(ppo, gaussian_case), (ppo_atari, categorical_case)])
@pytest.mark.parametrize("amp", [False, True], ids=["float64", "bf16"])
def test_ppo_loss_is_the_papers(module, case, norm_adv, clip_vloss, amp):
    args = module.Args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.02, vf_coef=0.7)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        agent, minibatch, parameters, outputs = case(torch.float32 if amp else torch.float64)
        loss, losses = module.ppo_loss(agent, minibatch, args)
    expected = slow_losses(outputs, minibatch, args)
    assert 0.2 < expected.clipfrac < 0.8 and 0 < minibatch.mask.sum() < len(minibatch.mask)
    whole = expected.policy_loss - 0.02 * expected.entropy + 0.7 * expected.value_loss
    # In bf16 sums in another order may round to the other side.
    rtol, atol = (2e-3, 1e-4) if amp else (1e-6, 1e-9)
    for name, value in losses._asdict().items():  # clipfrac is averaged in float32
        assert not value.requires_grad
        assert value.item() == pytest.approx(torch.as_tensor(getattr(expected, name)).item(), rel=rtol, abs=atol), name
    torch.testing.assert_close(loss, whole, rtol=rtol if amp else 1e-10, atol=atol if amp else 1e-12)
    assert_same_gradients(loss, whole, parameters, amp)


@pytest.mark.parametrize("live", [0, 1])
def test_hardly_anything_but_resets(live):
    """Of nothing but resets all is 0, the entropy bonus too; one step has no spread to be normalised by."""
    agent, minibatch, parameters, _ = gaussian_case()
    minibatch.mask.copy_(torch.arange(64) < live)
    loss, losses = ppo.ppo_loss(agent, minibatch, ppo.Args(ent_coef=0.1))
    gradient = torch.autograd.grad(loss, parameters, materialize_grads=True)
    assert torch.isfinite(torch.stack(losses)).all() and all(x.isfinite().all() for x in gradient)
    assert losses.policy_loss == 0
    assert (losses.entropy != 0) == (loss != 0) == any(x.any() for x in gradient) == bool(live)


@pytest.mark.parametrize("module", [ppo, ppo_atari, pqn, pqn_atari])
def test_only_gradients_longer_than_the_norm_are_cut_to_it(module, monkeypatch):
    p = torch.zeros(2, requires_grad=True)
    agent, rollout = (
        SimpleNamespace(parameters=lambda: [p]),
        SimpleNamespace(obs=p, minibatch=lambda gradient: gradient),
    )
    loss = "pqn_loss" if hasattr(module, "pqn_loss") else "ppo_loss"
    monkeypatch.setattr(module, loss, lambda agent, gradient, *_: (gradient @ p, [p.detach()]))
    update = module.make_update(agent, torch.optim.SGD([p], lr=1.0), rollout, module.Args(max_grad_norm=0.5))
    for gradient, parameters in (([0.06, 0.08], [-0.06, -0.08]), ([-6.0, 8.0], [0.24, -0.48])):
        update(torch.tensor(gradient))
        assert p.tolist() == pytest.approx(parameters, rel=1e-5)


@pytest.mark.parametrize("script", with_long(PPO))
@pytest.mark.parametrize("target_kl, epochs", [(1e-4, 1), (1e4, 3)])
def test_target_kl_stops_the_epochs(script, tmp_path, target_kl, epochs):
    flags = ["--update-epochs=3", "--learning-rate=0.03", "--no-anneal-lr", "--total-timesteps=128"]
    result = summary(run_tiny(script, tmp_path, *flags, f"--target-kl={target_kl}"))
    assert result["optimizer_steps"] == 2 * epochs * 4  # iterations, epochs, minibatches


# --------------------------------------------------------------------------------------------------- PQN'S LOSS


def slow_q_values(network, obs):
    """Twice a product, its norm and relu, the second time in bf16 under autocast; a product that never is."""
    x = obs
    for linear, norm, near in ((network[0], network[1], lambda x: x), (network[3], network[4], rounded)):
        x = near(product(near(x), near(linear.weight.t())) + near(linear.bias))
        x = x - x.mean(1, keepdim=True)
        x = torch.relu(near(x / ((x**2).mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias))
    return product(x, network[6].weight.t()) + network[6].bias


@torch.no_grad()
def test_pqns_network_in_bf16():
    torch.manual_seed(0)
    network, obs = pqn.QNetwork(6, 3), 10 + torch.randn(64, 6)
    for p in network.parameters():
        p += 0.1 * torch.randn_like(p)
    with torch.autocast("cpu", torch.bfloat16):
        values, expected = network(obs), slow_q_values(network, obs)
    assert values.dtype == torch.float32
    assert (values - expected).abs().mean() < 0.1 * (values - slow_q_values(network, obs)).abs().mean()


@pytest.mark.parametrize("amp", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize("module", [pqn, pqn_atari])
def test_pqn_loss_equals_the_formula_row_by_row(module, amp):
    torch.manual_seed(0)
    dtype, rtol = (torch.float32, 2e-3) if amp else (torch.float64, 1e-10)
    network = pqn.QNetwork(6, 3).to(dtype)
    network[6].bias.data += 100
    for p in network.parameters():
        p.data += 0.1 * torch.randn_like(p)  # biases and the norms' weights too
    obs, returns, actions = torch.randn(12, 6).to(dtype), (100 + torch.randn(12)).to(dtype), torch.randint(3, (12,))
    columns = dict(obs=obs, actions=actions, returns=returns, mask=(torch.arange(12) % 5 > 0).to(dtype))
    if "values" in module.Minibatch._fields:  # which are not learned from
        columns["values"] = torch.randn(12)
    rows = [i for i in range(12) if i % 5]
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss, losses = module.pqn_loss(network, module.Minibatch(**columns))
        values = [slow_q_values(network, obs)[i, actions[i]] for i in rows]
    expected = sum((value - returns[i]) ** 2 for i, value in zip(rows, values, strict=True)) / 9
    assert loss.item() == losses.td_loss.item() == pytest.approx(expected.item(), rel=rtol)
    assert losses.q_values.item() == pytest.approx(sum(values).item() / 9, rel=rtol)
    assert_same_gradients(loss, expected, list(network.parameters()), amp)


@pytest.mark.parametrize("module", [pqn, pqn_atari, dqn])
def test_epsilon_falls_linearly_and_stays(module):
    args = module.Args(total_timesteps=1000, start_e=0.9, end_e=0.1, exploration_fraction=0.4)
    epsilons = [module.linear_schedule(args, step) for step in (0, 100, 200, 400, 401, 1000)]
    assert epsilons == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1, 0.1])
