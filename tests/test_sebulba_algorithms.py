"""Networks, targets and losses of the distributed scripts against slow transcriptions of their papers."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sebulba_runs import DISTRIBUTED
from test_on_policy_targets import random_rollout, slow_gae

import leanrl.cleanba_impala as impala
import leanrl.cleanba_ppo as ppo
import leanrl.ppo_atari_envpool as atari
from leanrl.sebulba.actor import make_act
from leanrl.support.errors import UsageError
from leanrl.support.optim import FlatRMSProp

IMAGES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = gym.spaces.Box(-1, 1, (10, 5), np.float32)


@pytest.fixture(params=DISTRIBUTED)
def module(request):
    return importlib.import_module(f"leanrl.{request.param}")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


def same_max_pool(x):
    """TensorFlow's definition: output ceil(n / 2); total padding (out - 1) * 2 + 3 - n, the smaller half first."""
    height, width = x.shape[-2:]
    out = torch.empty(*x.shape[:2], -(-height // 2), -(-width // 2))
    top = max((out.shape[2] - 1) * 2 + 3 - height, 0) // 2
    left = max((out.shape[3] - 1) * 2 + 3 - width, 0) // 2
    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            rows = slice(max(2 * i - top, 0), 2 * i - top + 3)
            out[:, :, i, j] = x[:, :, rows, max(2 * j - left, 0) : 2 * j - left + 3].amax((2, 3))
    return out


@pytest.mark.parametrize("size", [(84, 84), (42, 42), (21, 21), (11, 84), (5, 8)])
def test_pooling_pads_as_same_does(module, size):
    sequence = module.ConvSequence(2, 3)
    x = torch.randn(2, 2, *size)
    expected = sequence.blocks(same_max_pool(sequence.conv(x)))
    torch.testing.assert_close(sequence(x), expected)


def test_impala_network(module):
    torch.manual_seed(0)
    agent = module.make_agent(IMAGES, 18, module.Args())
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    logits, values = agent(obs)
    assert logits.shape == (3, 18) and values.shape == (3,)
    # 84 -> 42 -> 21 -> 11, and 15 convolutions.
    convolutions = [m for m in agent.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 15 and agent.torso[-2].in_features == 11 * 11 * 32
    for conv in convolutions:
        fan_in = conv.weight[0].numel()
        assert conv.weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.1)
        assert conv.weight.abs().max() <= 2.0001 * fan_in**-0.5 / 0.8796
    # Slowly, layer by layer.
    x = obs / 255.0
    for stage in list(agent.torso)[:3]:
        x = same_max_pool(F.conv2d(x, stage.conv.weight, stage.conv.bias, padding=1))
        for block in stage.blocks:
            y = F.conv2d(x.relu(), block.conv0.weight, block.conv0.bias, padding=1)
            x = x + F.conv2d(y.relu(), block.conv1.weight, block.conv1.bias, padding=1)
    hidden = agent.torso[-2](x.relu().flatten(1)).relu()
    torch.testing.assert_close(logits, agent.actor(hidden), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(values, agent.critic(hidden).squeeze(1), rtol=1e-3, atol=1e-5)


def test_nature_network(module):
    torch.manual_seed(0)
    agent = module.make_agent(IMAGES, 4, module.Args(torso="nature"))
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    hidden = obs / 255.0
    for conv, stride in zip((agent.torso[0], agent.torso[2], agent.torso[4]), (4, 2, 1), strict=True):
        hidden = F.conv2d(hidden, conv.weight, conv.bias, stride).relu()
    hidden = agent.torso[-2](hidden.flatten(1)).relu()
    logits, values = agent(obs)
    torch.testing.assert_close(logits, agent.actor(hidden), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values, agent.critic(hidden).squeeze(1), rtol=1e-4, atol=1e-5)


def test_the_observations_choose_the_network(module):
    assert isinstance(module.make_agent(VECTORS, 3, module.Args()), module.VectorAgent)
    nature = module.make_agent(IMAGES, 4, module.Args(torso="nature"))
    assert nature(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))[0].shape == (2, 4)
    assert isinstance(nature.torso, module.NatureCNN)
    for torso in ("impala", "nature"):
        with pytest.raises(UsageError, match=f"--torso {torso}: "):
            module.make_agent(VECTORS, 3, module.Args(torso=torso))


@pytest.mark.parametrize("torso", ["impala", "nature"])
def test_acting_in_bf16_is_autocast(module, torso):
    """Bit for bit, with matrices that were rounded after the parameters changed last; heads are float32."""
    torch.manual_seed(0)
    agent = module.make_agent(IMAGES, 4, module.Args(torso=torso))
    act, refresh = make_act(agent, "bf16", torch.device("cpu"))
    obs, noise = torch.randint(0, 256, (3, *IMAGES.shape), dtype=torch.uint8), torch.randn(3, 4)
    with torch.no_grad():
        before = act(obs, noise)
        for parameter in agent.parameters():
            parameter.mul_(2.0)
        refresh()
        actions, logprobs, values = after = act(obs, noise)
        with torch.autocast("cpu", torch.bfloat16):
            logits, expected = agent(obs)
    assert logits.dtype == expected.dtype == torch.float32 and not torch.equal(before, after)
    assert torch.equal(values, expected) and torch.equal(actions, (logits + noise).argmax(1).float())
    assert torch.equal(logprobs, logits.log_softmax(1)[range(3), actions.long()])


# --------------------------------------------------------------------------------------------------------------- PPO


@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_sum(seed):
    *rollout, _ = random_rollout(seed)
    expected = slow_gae(*rollout, 0.99, 0.95)
    torch.testing.assert_close(ppo.compute_gae(*rollout, 0.99, 0.95), expected, rtol=1e-10, atol=1e-12)


def minibatch(seed=0, size=64, num_actions=4):
    """logits, newvalue, actions, logprobs, advantages, returns, weights."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, num_actions, generator=g)
    actions = torch.randint(num_actions, (size,), generator=g)
    logprobs = logits.log_softmax(1)[torch.arange(size), actions] + 0.3 * torch.randn(size, generator=g)
    rest = [torch.randn(size, generator=g) * scale + 1 for scale in (1, 3, 2)]
    weights = (torch.rand(size, generator=g) > 0.2).float()
    return logits, rest[0], actions, logprobs, rest[1], rest[2], weights


@pytest.mark.parametrize("norm_adv", [True, False])
def test_ppo_loss_is_the_papers_over_live_rows(norm_adv):
    args = ppo.Args(norm_adv=norm_adv)
    logits, newvalue, actions, logprobs, advantages, returns, weights = minibatch()
    loss, parts = ppo.ppo_loss(logits, newvalue, actions, logprobs, advantages, returns, weights, args)
    live = weights > 0
    policy = torch.distributions.Categorical(logits=logits[live])
    ratio = (policy.log_prob(actions[live]) - logprobs[live]).exp()
    adv = advantages[live]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8) if norm_adv else adv
    pg_loss = -torch.min(adv * ratio, adv * ratio.clamp(0.9, 1.1)).mean()
    v_loss = 0.5 * ((newvalue - returns)[live] ** 2).mean()
    entropy = policy.entropy().mean()
    torch.testing.assert_close(loss, pg_loss - 0.01 * entropy + 0.5 * v_loss)
    clipfrac = ((ratio - 1).abs() > 0.1).float().mean()
    assert 0.1 < clipfrac < 0.9
    expected = torch.stack([pg_loss, v_loss, entropy, -ratio.log().mean(), (ratio - 1 - ratio.log()).mean(), clipfrac])
    torch.testing.assert_close(parts, expected)


def test_on_images_ppo_is_that_of_one_process():
    """The same network, loss and gradient, but that Cleanba does not clip the value loss."""
    torch.manual_seed(0)
    ours, theirs = ppo.make_agent(IMAGES, 4, ppo.Args(torso="nature")), atari.Agent(4)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    obs = torch.randint(0, 256, (16, *IMAGES.shape), dtype=torch.uint8)
    _, values, actions, noise, *targets, weights = minibatch(size=16)
    logprobs = ours(obs)[0].log_softmax(1)[range(16), actions].detach() + 0.1 * noise
    loss, parts = ppo.ppo_loss(*ours(obs), actions, logprobs, *targets, weights, ppo.Args())
    args = atari.Args(clip_vloss=False)
    batch = atari.Minibatch(obs, actions, logprobs, *targets, values, weights)
    expected, losses = atari.ppo_loss(theirs, batch, args)
    torch.testing.assert_close(parts, torch.stack(losses))
    gradients = torch.autograd.grad(loss, list(ours.parameters()))
    expected_gradients = torch.autograd.grad(expected, list(theirs.parameters()))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ IMPALA


def slow_vtrace(log_rhos, rewards, values, terminations, dones, gamma, rho_bar, c_bar):
    """Equation 1 and section 4.2 of the paper, a sum for each step, over the steps of one episode."""
    num_steps, num_envs = rewards.shape
    rhos = log_rhos.exp()
    vs, advantages = torch.zeros_like(rewards), torch.zeros_like(rewards)

    def target(s, n):
        if s == num_steps:
            return values[s, n]
        total, product = values[s, n].clone(), 1.0
        for t in range(s, num_steps):
            next_value = 0.0 if terminations[t, n] else values[t + 1, n]
            delta = min(rho_bar, rhos[t, n]) * (rewards[t, n] + gamma * next_value - values[t, n])
            total += gamma ** (t - s) * product * delta
            product *= min(c_bar, rhos[t, n])
            if dones[t, n]:
                break
        return total

    for n in range(num_envs):
        for s in range(num_steps):
            vs[s, n] = target(s, n)
            after = 0.0 if terminations[s, n] else values[s + 1, n] if dones[s, n] else target(s + 1, n)
            advantages[s, n] = min(rho_bar, rhos[s, n]) * (rewards[s, n] + gamma * after - values[s, n])
    return vs, advantages


@pytest.mark.parametrize("rho_bar, c_bar", [(1.0, 1.0), (2.0, 0.5)])
def test_vtrace_equals_the_sum(rho_bar, c_bar):
    rewards, values, terminations, dones, resets = random_rollout(seed=7, num_steps=25)
    assert terminations.sum() > 3 and (dones - terminations).sum() > 3
    log_rhos = 0.5 * torch.randn(rewards.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = (log_rhos, rewards, values, terminations, dones, 0.97, rho_bar, c_bar)
    actual, expected = impala.vtrace(*told), slow_vtrace(*told)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours[~resets], theirs[~resets], rtol=1e-10, atol=1e-12)


def test_on_policy_vtrace_is_the_n_step_return():
    """Rhos of 1: the paper's equation 2."""
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    values = torch.tensor([[7.0], [8.0], [9.0], [16.0]], dtype=torch.float64)
    zeros = torch.zeros_like(rewards)
    vs, advantages = impala.vtrace(zeros, rewards, values, zeros, zeros, 0.5, 1.0, 1.0)
    assert vs.squeeze(1).tolist() == [1 + 1 + 0.75 + 2, 2 + 1.5 + 4, 3 + 8]
    torch.testing.assert_close(advantages, vs - values[:-1])


def loss_inputs(shift=0):
    """A rollout of two environments whose values are the true discounted returns, ends of both kinds included.

    ``shift`` moves rewards and flags by so many steps, as storage filled by ``recv`` would without care.
    """
    g = torch.Generator().manual_seed(3)
    rewards, _, terminations, dones, resets = random_rollout(seed=3, num_steps=30, num_envs=2)
    values = torch.zeros(31, 2, dtype=torch.float64)
    values[-1] = 1.5
    # A truncated episode's last observation has a value of its own; the reset that follows starts from it.
    for t in reversed(range(30)):
        for n in range(2):
            if resets[t, n]:
                values[t, n] = 0.7
            else:
                values[t, n] = rewards[t, n] + 0.99 * (0.0 if terminations[t, n] else values[t + 1, n])
    logits = torch.randn(31, 2, 3, generator=g)
    actions = torch.randint(3, (30, 2), generator=g)
    logprobs = logits[:-1].log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    told = [x.float().roll(shift, 0) for x in (rewards, terminations, dones, (~resets).double())]
    return logits, values.float(), actions, logprobs, *told


@pytest.mark.parametrize("off_policy", [False, True])
def test_true_values_have_no_loss(off_policy):
    logits, values, actions, logprobs, *told = loss_inputs()
    logprobs = logprobs + off_policy * 0.5 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    assert 0 < told[1].sum() < told[2].sum()  # terminations and truncations
    loss, parts = impala.impala_loss(logits, values, actions, logprobs, *told, impala.Args(ent_coef=0.0))
    assert abs(loss.item()) < 1e-4 and parts[:2].abs().max() < 1e-4 and parts[2] > 1


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shift_in_time_has_a_loss(shift):
    logits, values, actions, logprobs, *told = loss_inputs(shift)
    _, parts = impala.impala_loss(logits, values, actions, logprobs, *told, impala.Args())
    assert parts[:2].abs().min() > 1


def test_reset_steps_change_nothing_of_impalas_loss():
    logits, values, actions, logprobs, rewards, terminations, dones, weights = loss_inputs()
    values = values + torch.randn(values.shape, generator=torch.Generator().manual_seed(5))
    resets = weights == 0
    assert resets.sum() > 3

    def loss_and_gradient(logits, actions, logprobs, rewards):
        inputs = [x.clone().requires_grad_() for x in (logits, values)]
        told = (actions, logprobs, rewards, terminations, dones, weights)
        loss, _ = impala.impala_loss(*inputs, *told, impala.Args())
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    before = loss_and_gradient(logits, actions, logprobs, rewards)
    changed_logits = logits.clone()
    changed_logits[:-1][resets] += 1.0
    after = loss_and_gradient(
        changed_logits, (actions + resets) % 3, logprobs + resets.float(), rewards + 9 * resets.float()
    )
    for ours, theirs in zip(before, after, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(before[0], loss_and_gradient(logits, actions, logprobs, rewards + 1)[0])


def test_rmsprop_equals_pytorchs_and_exchanges_states_with_it():
    torch.manual_seed(0)
    plain, quick = torch.nn.Linear(7, 3), torch.nn.Linear(7, 3)
    quick.load_state_dict(plain.state_dict())
    theirs = torch.optim.RMSprop(plain.parameters(), lr=1e-2, alpha=0.99, eps=0.01)
    ours = FlatRMSProp(quick, lr=1e-2, alpha=0.99, eps=0.01)

    def steps(count):
        for _ in range(count):
            for parameter in plain.parameters():
                parameter.grad = torch.randn(parameter.shape)
            theirs.step()
            with torch.no_grad():
                ours.step(ours.flatten({name: p.grad for name, p in plain.named_parameters()}))
        for p, q in zip(plain.parameters(), quick.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    start = ours.params.clone()
    steps(100)
    assert (ours.params - start).abs().max() > 0.1
    mine, others = ours.state_dict(), theirs.state_dict()
    theirs.load_state_dict({**others, "state": mine["state"]})
    ours.load_state_dict(others)
    steps(50)
