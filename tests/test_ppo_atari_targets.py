"""PPO's network and loss on Atari against slow transcriptions; the fast variant has both in the same words."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Categorical

from leanrl.ppo_atari_envpool import Agent, Args, Losses, Minibatch, Rollout, ppo_loss

NUM_ACTIONS = 4


def slow_network(agent: Agent, obs: torch.Tensor, rounded) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and values in float64, output pixel for output pixel; ``rounded`` is what goes in and out of a layer."""
    first, _, second, _, third, _, _, hidden, _ = agent.network
    x = obs.double() / 255
    for layer, size, stride in ((first, 8, 4), (second, 4, 2), (third, 3, 1)):
        weight, bias = rounded(layer.weight.double()), rounded(layer.bias.double())
        out = (x.shape[-1] - size) // stride + 1
        pixels = torch.zeros(len(obs), len(weight), out, out, dtype=torch.float64)
        for i in range(out):
            for j in range(out):
                patch = rounded(x[:, :, i * stride : i * stride + size, j * stride : j * stride + size])
                pixels[:, :, i, j] = (patch[:, None] * weight).sum((2, 3, 4)) + bias
        x = torch.relu(rounded(pixels))
    assert x.shape[1:] == (64, 7, 7)
    x = (x.flatten(1)[:, None] * rounded(hidden.weight.double())).sum(2) + rounded(hidden.bias.double())
    x = torch.relu(rounded(x))
    logits, value = ((x[:, None] * head.weight.double()).sum(2) + head.bias for head in (agent.actor, agent.critic))
    return logits, value[:, 0]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@torch.no_grad()
def test_the_network_is_the_papers(memory_format, amp):
    torch.manual_seed(0)
    agent = Agent(NUM_ACTIONS)
    for layer in (*agent.network, agent.actor, agent.critic):
        if hasattr(layer, "bias"):
            layer.bias.normal_(std=0.1)
    agent.actor.weight *= 100  # as far from nothing as the values
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    logits, expected = slow_network(agent, obs, (lambda x: x.bfloat16().double()) if amp else lambda x: x)
    agent.to(memory_format=memory_format)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        probs, values = agent(obs)
    tolerance = 1e-3 if amp else 1e-5
    if amp:  # and what is not rounded would be seen
        exact, _ = slow_network(agent, obs, lambda x: x)
        assert (exact - logits).abs().max() > 2 * tolerance
    assert logits.std() > 0.3 and expected.std() > 0.03
    assert probs.logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close(probs.logits.double(), logits.log_softmax(1), rtol=0, atol=tolerance)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)


def slow_losses(logits, newvalues, batch: Minibatch, norm_adv: bool, clip_vloss: bool, clip: float) -> Losses:
    """https://arxiv.org/abs/1707.06347, equations 7 and 9, row for row, over the rows of weight 1."""
    rows = [i for i in range(len(logits)) if batch.weights[i] == 1]
    advantages = {i: batch.advantages[i] for i in rows}
    if norm_adv:
        mean = sum(advantages.values()) / len(rows)
        deviation = (sum((a - mean) ** 2 for a in advantages.values()) / (len(rows) - 1)).sqrt()
        advantages = {i: (a - mean) / (deviation + 1e-8) for i, a in advantages.items()}
    sums = dict.fromkeys(Losses._fields, 0.0)
    for i in rows:
        chances = logits[i].exp() / logits[i].exp().sum()
        ratio = chances[batch.actions[i]] / batch.logprobs[i].exp()
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        error = (newvalues[i] - batch.returns[i]) ** 2
        if clip_vloss:
            old, new = batch.values[i], newvalues[i]
            kept = new if abs(new - old) < clip else old + clip * torch.sign(new - old)
            error = max(error, (kept - batch.returns[i]) ** 2)
        sums["policy_loss"] += -min(ratio * advantages[i], clipped * advantages[i])
        sums["value_loss"] += error / 2
        sums["entropy"] += -sum(p * p.log() for p in chances)
        sums["old_approx_kl"] += -ratio.log()
        sums["approx_kl"] += ratio - 1 - ratio.log()
        sums["clipfrac"] += float(clipped != ratio)
    return Losses(*(total / len(rows) for total in sums.values()))


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_loss_is_the_papers(norm_adv, clip_vloss):
    size, clip = 48, 0.1
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    logits, newvalues = randn(size, NUM_ACTIONS).requires_grad_(), randn(size).requires_grad_()
    actions = torch.randint(0, NUM_ACTIONS, (size,), generator=generator)
    logprobs = (logits.log_softmax(1)[range(size), actions] + 0.15 * randn(size)).detach()
    values = (newvalues + 0.2 * randn(size)).detach()
    weights = (torch.rand(size, generator=generator) > 0.2).double()
    batch = Minibatch(torch.zeros(size), actions, logprobs, 1 + 2 * randn(size), randn(size), values, weights)
    expected = slow_losses(logits, newvalues, batch, norm_adv, clip_vloss, clip)
    assert 0.2 < expected.clipfrac < 0.8 and weights.sum() < size

    args = Args(norm_adv=norm_adv, clip_vloss=clip_vloss, clip_coef=clip, ent_coef=0.02, vf_coef=0.7)
    loss, losses = ppo_loss(lambda obs: (Categorical(logits=logits), newvalues), batch, args)
    whole = expected.policy_loss - 0.02 * expected.entropy + 0.7 * expected.value_loss
    torch.testing.assert_close(loss, whole, rtol=1e-10, atol=1e-12)
    for name, value in losses._asdict().items():
        assert not value.requires_grad
        expected_value = torch.as_tensor(getattr(expected, name)).item()
        assert value.item() == pytest.approx(expected_value, rel=1e-6, abs=1e-9), name
    gradients = (torch.autograd.grad(x, [logits, newvalues]) for x in (loss, whole))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


def test_minibatches_are_channels_last():
    """Where they are not, every convolution of an update rearranges its input."""
    args = SimpleNamespace(num_steps=5, num_envs=3)
    rollout = Rollout.allocate(torch.zeros(3, 4, 84, 84, dtype=torch.uint8), args)
    rollout.obs.copy_(torch.randint(0, 256, rollout.obs.shape, dtype=torch.uint8))
    rollout.values.copy_(torch.arange(18.0).view(6, 3))
    minibatch = rollout.minibatch(torch.tensor([7, 2]))
    assert minibatch.obs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(minibatch.obs, torch.stack([rollout.obs[2, 1], rollout.obs[0, 2]]))
    assert minibatch.values.tolist() == [7.0, 2.0]
