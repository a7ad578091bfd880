"""Networks, targets and losses of the distributed scripts against slow transcriptions of their papers."""

import inspect
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Discrete
from test_on_policy_targets import random_rollout

import leanrl.cleanba_impala as impala
import leanrl.cleanba_ppo as ppo
import leanrl.ppo_atari_envpool as atari
import leanrl.ppo_continuous_action as continuous
from leanrl.sebulba.actor import ActingAgent, flatten
from leanrl.support.errors import UsageError
from leanrl.support.executables import CompiledStep
from leanrl.support.pooling import max_pool_same

IMAGES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = gym.spaces.Box(-1, 1, (10, 5), np.float32)


# ---------------------------------------------------------------------------------------------------------- NETWORKS


SHARED = "layer_init conv3x3 ResidualBlock ConvSequence ImpalaCNN NatureCNN ImageAgent VectorAgent"


@pytest.mark.parametrize("name", SHARED.split())
def test_what_the_scripts_share_has_the_same_words(name):
    assert inspect.getsource(getattr(impala, name)) == inspect.getsource(getattr(ppo, name))


def same_max_pool(x):
    """TensorFlow's definition: output ceil(n / 2); total padding (out - 1) * 2 + 3 - n, the smaller half first."""
    out = torch.empty(*x.shape[:2], *(-(-size // 2) for size in x.shape[2:]))
    top, left = (max((out.shape[i] - 1) * 2 + 3 - x.shape[i], 0) // 2 for i in (2, 3))
    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            rows = slice(max(2 * i - top, 0), 2 * i - top + 3)
            out[:, :, i, j] = x[:, :, rows, max(2 * j - left, 0) : 2 * j - left + 3].amax((2, 3))
    return out


@pytest.mark.parametrize("size", [(84, 84), (42, 42), (21, 21), (11, 84), (5, 8)])
def test_pooling_pads_as_same_does_and_compiles(size):
    x = torch.randn(2, 16, *size).to(memory_format=torch.channels_last).requires_grad_()

    def gradient(weights: torch.Tensor) -> torch.Tensor:
        x.grad = None
        (max_pool_same(x.bfloat16()) * weights).sum().backward()  # many are equal
        return x.grad

    torch.testing.assert_close(max_pool_same(x), weights := same_max_pool(x.detach()), rtol=0, atol=0)
    compiled, plain = CompiledStep(gradient, x.device)(weights).clone(), gradient(weights)
    assert plain.count_nonzero() and torch.equal(compiled, plain)


def test_impala_network():
    torch.manual_seed(0)
    agent = ppo.make_agent(IMAGES, Discrete(18), ppo.Args())
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    logits, values = agent(obs)
    assert logits.shape == (3, 18) and values.shape == (3,)
    # 84 -> 42 -> 21 -> 11, and 15 convolutions.
    convolutions = [m for m in agent.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 15 and agent.torso[-2].in_features == 11 * 11 * 32
    assert ppo.make_agent(IMAGES, Discrete(18), ppo.Args(hiddens=(8, 6)))(obs)[0].shape == (3, 18)
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


def test_the_observations_choose_the_network():
    assert isinstance(ppo.make_agent(VECTORS, Discrete(3), ppo.Args()), ppo.VectorAgent)
    nature = ppo.make_agent(IMAGES, Discrete(4), ppo.Args(torso="nature"))
    assert nature(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))[0].shape == (2, 4)
    assert isinstance(nature.torso, ppo.NatureCNN)
    for torso in ("impala", "nature"):
        with pytest.raises(UsageError, match=f"--torso {torso}: "):
            ppo.make_agent(VECTORS, Discrete(3), ppo.Args(torso=torso))


@pytest.mark.parametrize("torso", ["impala", "nature"])
def test_acting_in_bf16_is_autocast(torso):
    """Bit for bit, with matrices that were rounded after the parameters changed last; heads are float32."""
    torch.manual_seed(0)
    agent = ppo.make_agent(IMAGES, Discrete(4), ppo.Args(torso=torso))
    ours = ActingAgent(agent, "bf16")
    act = ppo.make_act(ours, ppo.Args(amp="bf16"))
    obs, noise = torch.randint(0, 256, (3, *IMAGES.shape), dtype=torch.uint8), torch.randn(3, 4)
    with torch.no_grad():
        before = act(obs, noise)
        for parameter in agent.parameters():
            parameter.mul_(2.0)
        ours.load(flatten(agent))
        actions, logprobs, values = after = act(obs, noise)
        with torch.autocast("cpu", torch.bfloat16):
            logits, expected = agent(obs)
    assert logits.dtype == expected.dtype == torch.float32 and not torch.equal(before, after)
    assert torch.equal(values, expected) and torch.equal(actions, (logits + noise).argmax(1).float())
    assert torch.equal(logprobs, logits.log_softmax(1)[range(3), actions.long()])


@pytest.mark.parametrize("module", [ppo, impala])
def test_only_gradients_longer_than_the_norm_are_cut_to_it(module):
    p = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    optimizer.params = [p]
    agent = SimpleNamespace(parameters=lambda: [p])
    _, step = module.make_update(agent, optimizer, [], module.Args(max_grad_norm=0.5))
    for gradient, expected in (([0.06, 0.08], [-0.06, -0.08]), ([-6.0, 8.0], [0.24, -0.48])):
        step(torch.tensor(gradient + [0.0] * len(module.Losses._fields)))
        assert p.tolist() == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- PPO


@pytest.mark.parametrize("norm_adv", [True, False])
def test_on_images_ppo_is_that_of_one_process(norm_adv):
    """The same network, loss and gradient, but that Cleanba does not clip the value loss."""
    torch.manual_seed(0)
    ours, theirs = ppo.make_agent(IMAGES, Discrete(4), ppo.Args(torso="nature")), atari.Agent(4)

    def as_theirs(tensors) -> list[torch.Tensor]:
        """The linear layer behind the convolutions takes [H, W, C] there, [C, H, W] here."""
        columns = (512, 64 * 7 * 7)
        return [x.view(512, 64, 49).mT.reshape(columns) if x.shape == columns else x for x in tensors]

    theirs.load_state_dict(dict(zip(theirs.state_dict(), as_theirs(ours.state_dict().values()), strict=True)))
    obs, actions = torch.randint(0, 256, (16, *IMAGES.shape), dtype=torch.uint8), torch.randint(4, (16,))
    logprobs = ours(obs)[0].log_softmax(1)[range(16), actions].detach() + 0.15 * torch.randn(16)
    advantages, returns, values = 1 + torch.randn(3, 16)
    batch = ppo.Minibatch(obs, actions, logprobs, advantages, returns, (torch.arange(16) % 5 > 0).float())
    loss, parts = ppo.ppo_loss(ours, batch, ppo.Args(norm_adv=norm_adv))
    assert 0.1 < parts.clipfrac < 0.9
    args = atari.Args(clip_vloss=False, norm_adv=norm_adv)
    expected, losses = atari.ppo_loss(theirs, atari.Minibatch(values=values, **batch._asdict()), args)
    torch.testing.assert_close(tuple(parts), tuple(losses))
    gradients = torch.autograd.grad(loss, list(ours.parameters()))
    expected_gradients = torch.autograd.grad(expected, list(theirs.parameters()))
    torch.testing.assert_close(as_theirs(gradients), list(expected_gradients), rtol=1e-3, atol=1e-5)


def continuous_agent():
    """One whose observations are around 100, and its twin among the scripts of one process."""
    torch.manual_seed(0)
    ours = ppo.make_agent(gym.spaces.Box(-1, 1, (5,)), gym.spaces.Box(-1, 1, (3,)), ppo.Args())
    with torch.no_grad():
        ours.actor_logstd.copy_(torch.tensor([-0.5, 0.0, 0.3]))
    ours.obs_moments.mean.copy_(100 + torch.randn(5))
    ours.obs_moments.var.copy_(torch.rand(5) + 0.5)
    theirs = continuous.Agent(5, 3)
    state = ours.state_dict()
    theirs.load_state_dict({name: state[name.replace("actor_mean", "actor")] for name in theirs.state_dict()})
    obs = 100 + 3 * torch.randn(16, 5, dtype=torch.float64)
    normalized = (obs - ours.obs_moments.mean) / torch.sqrt(ours.obs_moments.var + 1e-8)
    return ours, theirs, obs, normalized.clamp(-10, 10).float()


def test_with_continuous_actions_ppo_is_that_of_one_process():
    """The same network, loss and gradient, but that Cleanba does not clip the value loss."""
    ours, theirs, obs, normalized = continuous_agent()
    actions, (noise, advantages, returns) = torch.randn(16, 3), 1 + torch.randn(3, 16)
    logprobs = theirs.get_policy(normalized).log_prob(actions).sum(1).detach() + 0.3 * (noise - 1)
    batch = ppo.Minibatch(obs, actions, logprobs, advantages, returns, (torch.arange(16) % 5 > 0).float())
    loss, parts = ppo.ppo_loss(ours, batch, ppo.Args(clip_coef=0.2))
    assert 0.1 < parts.clipfrac < 0.9
    args = continuous.Args(clip_vloss=False, ent_coef=0.01)
    told = {**batch._asdict(), "obs": normalized, "values": batch.returns}
    expected, losses = continuous.ppo_loss(theirs, continuous.Minibatch(**told), args)
    torch.testing.assert_close(tuple(parts), tuple(losses))
    parameters = [ours.get_parameter(name.replace("actor_mean", "actor")) for name, _ in theirs.named_parameters()]
    assert {*parameters} == {*ours.parameters()}
    gradients = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, list(theirs.parameters())))


def test_continuous_actions_follow_their_noise():
    """Also after the parameters, and what observations are normalised with, have changed."""
    ours, theirs, obs, normalized = continuous_agent()
    acting = ActingAgent(ppo.ContinuousAgent(5, 3), "none")
    acting.load(flatten(ours))
    assert all(map(torch.equal, acting._agent.state_dict().values(), ours.state_dict().values()))
    noise = torch.randn(16, 3)
    *actions, logprobs, values = ppo.make_act(acting, ppo.Args())(obs, noise)
    policy = theirs.get_policy(normalized)
    expected = policy.mean + policy.stddev * noise
    torch.testing.assert_close(torch.stack(actions, 1), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs, policy.log_prob(expected).sum(1).detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, theirs.get_value(normalized).detach(), rtol=1e-4, atol=1e-5)


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


def loss_inputs():
    """A rollout of two environments whose values are the true discounted returns, ends of both kinds included."""
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
    told = [x.float() for x in (rewards, terminations, dones, ~resets)]
    return logits, values.float(), impala.Minibatch(torch.zeros(31, 2), actions, logprobs, *told)


def loss_of(logits, values, batch):
    return impala.impala_loss(lambda obs: (logits.flatten(0, 1), values.flatten()), batch, impala.Args())


def test_true_values_have_no_loss():
    _, losses = loss_of(*loss_inputs())
    assert abs(losses.policy_loss) < 1e-4 and losses.value_loss < 1e-4 and losses.entropy > 1


def test_reset_steps_change_nothing_of_impalas_loss():
    logits, values, batch = loss_inputs()
    values = values + torch.randn(values.shape, generator=torch.Generator().manual_seed(5))
    resets = batch.mask == 0
    assert resets.sum() > 3

    def loss_and_gradient(logits, batch):
        inputs = [x.clone().requires_grad_() for x in (logits, values)]
        loss, _ = loss_of(*inputs, batch)
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    before = loss_and_gradient(logits, batch)
    changed_logits, more = logits.clone(), resets.float()
    changed_logits[:-1][resets] += 1.0
    changes = {"logprobs": batch.logprobs + more, "rewards": batch.rewards + 9 * more}
    after = loss_and_gradient(changed_logits, batch._replace(actions=(batch.actions + resets) % 3, **changes))
    for ours, theirs in zip(before, after, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.equal(before[0], loss_and_gradient(logits, batch._replace(rewards=batch.rewards + 1))[0])
