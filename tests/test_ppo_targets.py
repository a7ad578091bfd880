"""PPO's targets and loss against slow transcriptions of their formulas."""

import importlib
import math

import pytest
import torch
from scripts import PPO, run, summary, tiny

from leanrl.ppo_continuous_action import Agent, Args, Losses, Minibatch, ppo_loss


@pytest.fixture(params=PPO)
def compute_gae(request):
    return importlib.import_module(f"leanrl.{request.param}").compute_gae


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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_sum(compute_gae, seed, gamma, gae_lambda):
    *rollout, _ = random_rollout(seed)
    truncations = rollout[3] - rollout[2]
    assert rollout[2].sum() > 5 and truncations.sum() > 5
    expected = slow_gae(*rollout, gamma, gae_lambda)
    torch.testing.assert_close(compute_gae(*rollout, gamma, gae_lambda), expected, rtol=1e-10, atol=1e-12)


def test_gae_by_hand(compute_gae):
    # gamma 0.5, lambda 0.5. No end; the middle step terminates; the middle step is truncated.
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 3)
    values = torch.tensor([[4.0], [8.0], [12.0], [16.0]], dtype=torch.float64).expand(4, 3)
    terminations = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64)
    dones = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.float64)
    # deltas without an end: 1 + 4 - 4 = 1, 2 + 6 - 8 = 0, 3 + 8 - 12 = -1. Terminated, the second is 2 - 8 = -6.
    expected = [[1 - 1 / 16, 1 - 6 / 4, 1], [0 - 1 / 4, -6, 0], [-1, -1, -1]]
    advantages = compute_gae(rewards, values, terminations, dones, 0.5, 0.5)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


def test_resets_reach_no_other_step(compute_gae):
    rewards, values, terminations, dones, resets = random_rollout(seed=0)
    before = compute_gae(rewards, values, terminations, dones, 0.99, 0.95)
    after = compute_gae(rewards + 100.0 * resets, values, terminations, dones, 0.99, 0.95)
    assert resets.sum() > 10
    torch.testing.assert_close(after[~resets], before[~resets], rtol=0, atol=1e-12)
    assert (after[resets] != before[resets]).all()


def slow_mlp(network, x, rounded=lambda x: x):
    """Two hidden layers with tanh, product for product; ``rounded`` is what bf16 products go through."""
    first, second, last = network[0], network[2], network[4]
    for layer in (first, second):
        x = rounded((rounded(x)[:, None] * rounded(layer.weight)).sum(2) + rounded(layer.bias))
        x = rounded(torch.tanh(x))
    return (x[:, None] * last.weight).sum(2) + last.bias


def slow_logprobs(agent, obs, actions):
    """Log-density of a Gaussian of each number, by its formula."""
    z = (actions - slow_mlp(agent.actor_mean, obs)) / agent.actor_logstd.exp()
    return (-0.5 * z**2 - agent.actor_logstd - 0.5 * math.log(2 * math.pi)).sum(1)


@pytest.mark.parametrize("script", [script for script in PPO if "continuous" in script])
def test_networks_in_either_precision(script):
    """Under autocast the last layers stay float32."""
    torch.manual_seed(0)
    agent, obs = importlib.import_module(f"leanrl.{script}").Agent(11, 3), torch.randn(64, 11)
    for network in (agent.critic, agent.actor_mean):
        network[4].weight.data.normal_()
    for amp in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            policy, values = agent.get_policy(obs), agent.get_value(obs)
        rounded = (lambda x: x.bfloat16().float()) if amp else (lambda x: x)
        # Where sums in another order round to the other side, a hidden unit is off by 2**-8.
        tolerance = dict(rtol=0, atol=0.02 if amp else 1e-5)
        torch.testing.assert_close(values, slow_mlp(agent.critic, obs, rounded).squeeze(1), **tolerance)
        torch.testing.assert_close(policy.mean, slow_mlp(agent.actor_mean, obs, rounded), **tolerance)
        if amp:  # so a network that does not round would be seen
            for network, outputs in ((agent.critic, values.unsqueeze(1)), (agent.actor_mean, policy.mean)):
                assert (slow_mlp(network, obs) - outputs).abs().max() > 0.03
        assert values.dtype == policy.mean.dtype == torch.float32
        assert (values != values.bfloat16()).float().mean() > 0.9


def random_minibatch(agent, seed=0, size=64):
    """Ratios on both sides of the clip range."""
    torch.manual_seed(seed)
    obs = torch.randn(size, 11, dtype=torch.float64)
    with torch.no_grad():
        actions, values = agent.get_policy(obs).sample(), agent.get_value(obs)
        logprobs = slow_logprobs(agent, obs, actions) + 0.3 * torch.randn_like(values)
    old_values = values + 0.3 * torch.randn_like(values)
    returns, advantages = values + torch.randn_like(values), 2 + 3 * torch.randn_like(values)
    return Minibatch(obs, actions, logprobs, advantages, returns, old_values, weights=torch.ones_like(values))


def loss_and_gradient(agent, minibatch, args):
    loss, losses = ppo_loss(agent, minibatch, args)
    return loss.detach(), losses, torch.autograd.grad(loss, list(agent.parameters()), materialize_grads=True)


@pytest.fixture
def agent():
    torch.manual_seed(0)
    return Agent(11, 3).double()


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_loss_equals_cleanrls(agent, norm_adv, clip_vloss):
    args = Args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.01)
    minibatch = random_minibatch(agent)
    loss, losses, gradient = loss_and_gradient(agent, minibatch, args)

    # https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo_continuous_action.py
    obs, actions, logprobs, advantages, returns, values, _ = minibatch
    newvalue = slow_mlp(agent.critic, obs).squeeze(1)
    entropy = (agent.actor_logstd + 0.5 + 0.5 * math.log(2 * math.pi)).sum(1)
    logratio = slow_logprobs(agent, obs, actions) - logprobs
    ratio = logratio.exp()
    old_approx_kl = (-logratio).mean()
    approx_kl = ((ratio - 1) - logratio).mean()
    clipfrac = ((ratio - 1.0).abs() > args.clip_coef).double().mean()
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    v_loss = ((newvalue - returns) ** 2).mean()
    if clip_vloss:
        v_clipped = values + torch.clamp(newvalue - values, -0.2, 0.2)
        v_loss = torch.max((newvalue - returns) ** 2, (v_clipped - returns) ** 2).mean()
    v_loss = 0.5 * v_loss
    expected = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss

    assert 0.1 < clipfrac < 0.9
    expected_losses = Losses(
        policy_loss=pg_loss,
        value_loss=v_loss,
        entropy=entropy.mean(),
        old_approx_kl=old_approx_kl,
        approx_kl=approx_kl,
        clipfrac=clipfrac,
    )
    # Not to the last bit: clipfrac is averaged in float32.
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, list(agent.parameters())), rtol=1e-8, atol=1e-12)


def test_rows_of_weight_0_change_nothing(agent):
    args = Args(ent_coef=0.01)
    minibatch = random_minibatch(agent)
    minibatch.weights[::3] = 0.0
    loss, losses, gradient = loss_and_gradient(agent, minibatch, args)
    for name in ("actions", "logprobs", "advantages", "returns", "values"):
        column = getattr(minibatch, name)
        changed = minibatch._replace(**{name: column.clone()})
        getattr(changed, name)[::3] += torch.randn_like(column[::3])
        changed_loss, changed_losses, changed_gradient = loss_and_gradient(agent, changed, args)
        assert torch.equal(changed_loss, loss) and all(map(torch.equal, changed_losses, losses))
        assert all(map(torch.equal, changed_gradient, gradient))
        # In a row that counts, the same change does matter.
        getattr(changed, name)[1] += 1.0
        assert not torch.equal(loss_and_gradient(agent, changed, args)[0], loss)
    # And the loss is that of the other rows alone.
    rest = Minibatch(*(column[minibatch.weights > 0] for column in minibatch))
    torch.testing.assert_close(loss_and_gradient(agent, rest, args), (loss, losses, gradient), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("live", [0, 1])
def test_hardly_anything_but_resets(agent, live):
    """Of nothing but resets all is 0, the entropy bonus too; one step has no spread to be normalised by."""
    minibatch = random_minibatch(agent)
    minibatch.weights[live:] = 0.0
    loss, losses, gradient = loss_and_gradient(agent, minibatch, Args(ent_coef=0.1))
    assert torch.isfinite(torch.stack(losses)).all() and all(x.isfinite().all() for x in gradient)
    assert losses.policy_loss == 0
    assert (losses.entropy != 0) == (loss != 0) == any(x.any() for x in gradient) == bool(live)


@pytest.mark.parametrize("script", PPO)
@pytest.mark.parametrize("target_kl, epochs", [(1e-4, 1), (1e4, 3)])
def test_target_kl_stops_the_epochs(script, tmp_path, target_kl, epochs):
    flags = [*tiny(script), "--update-epochs=3", "--learning-rate=0.03", "--no-anneal-lr", "--total-timesteps=256"]
    flags += [f"--target-kl={target_kl}", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert run(script, *flags) == 0
    assert summary(tmp_path / "run")["optimizer_steps"] == 4 * epochs * 4  # iterations, epochs, minibatches
