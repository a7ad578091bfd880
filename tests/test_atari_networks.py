"""The networks on Atari against slow transcriptions; the fast variants have them in the same words."""

from types import SimpleNamespace

import pytest
import torch
from test_off_policy_targets import product, rounded
from test_on_policy_equality import random_frames

import leanrl.ppo_atari_envpool as ppo
import leanrl.pqn_atari_envpool as pqn
from leanrl.support.layers import interleaved


def slow_convolution(layer, x):
    """[B, C, H, W] -> [B, out, H', W'] in float64, pixel for pixel; under autocast, what goes in and out is rounded."""
    weight, bias = rounded(layer.weight.double()), rounded(layer.bias.double())
    (size, _), (stride, _) = layer.kernel_size, layer.stride
    out = (x.shape[-1] - size) // stride + 1
    pixels = torch.zeros(len(x), len(weight), out, out, dtype=torch.float64)
    for i in range(out):
        for j in range(out):
            patch = rounded(x[:, :, i * stride : i * stride + size, j * stride : j * stride + size])
            pixels[:, :, i, j] = (patch[:, None] * weight).sum((2, 3, 4)) + bias
    return rounded(pixels)


def slow_product(layer, x):
    return rounded(product(rounded(x), rounded(layer.weight.double().t())) + rounded(layer.bias.double()))


def slow_head(layer, x):
    return product(x, layer.weight.double().t()) + layer.bias.double()


def slow_ppo(agent, obs):
    """Logits and values."""
    first, _, second, _, third, _, hidden, _ = agent.network
    x = obs.double() / 255
    for layer in (first, second, third):
        x = torch.relu(slow_convolution(layer, x))
    assert x.shape[2:] == (7, 7)
    x = torch.relu(slow_product(hidden, x.movedim(1, -1).flatten(1)))
    return slow_head(agent.actor, x), slow_head(agent.critic, x)[:, 0]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("channels, layout", [(32, "contiguous_format"), (32, "channels_last"), (8, "channels_last")])
@torch.no_grad()
def test_ppos_network_is_the_papers(channels, layout, amp):
    torch.manual_seed(0)
    agent = ppo.Agent(4, channels)
    for layer in (*agent.network, agent.actor, agent.critic):
        if hasattr(layer, "bias"):
            layer.bias.normal_(std=0.1)
    agent.actor.weight *= 100  # as far from nothing as the values
    obs = random_frames(3)
    agent.to(memory_format=getattr(torch, layout))
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        (probs, values), (logits, expected) = agent(obs), slow_ppo(agent, obs)
    tolerance = 1e-3 if amp else 1e-5
    if amp:  # and what is not rounded would be seen
        exact, _ = slow_ppo(agent, obs)
        assert (exact - logits).abs().max() > 2 * tolerance
    assert logits.std() > 0.3 and expected.std() > 0.03
    assert probs.logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close(probs.logits.double(), logits.log_softmax(1), rtol=0, atol=tolerance)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)


def test_a_pixel_is_normalised_by_all_that_it_was():
    agent, frames = ppo.Agent(4, norm_obs=True), [random_frames(5, seed=seed) // (1 + seed) for seed in range(4)]
    for batch in frames:
        agent.observe(batch)
    seen, obs = torch.cat(frames).double(), random_frames(3)
    expected = ((obs - seen.mean(0)) / seen.std(0, correction=0)).clamp(-5, 5)
    torch.testing.assert_close(agent.normalized(obs), expected.float(), rtol=0, atol=1e-3)
    static = torch.full((2, 4, 84, 84), 87, dtype=torch.uint8)
    agent = ppo.Agent(4, norm_obs=True)
    agent.observe(static)
    assert agent.normalized(static).abs().max() < 0.01 and agent.normalized(static + 100).min() == 5.0


def slow_norm(layer, x):
    """Over all but the batch; the layer's weights are [H, W, C] for an image [C, H, W]."""
    weight, bias = layer.weight.double(), layer.bias.double()
    if x.dim() == 4:
        weight, bias = weight.permute(2, 0, 1), bias.permute(2, 0, 1)
    x = x - x.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1))
    return x / ((x**2).flatten(1).mean(1) + 1e-5).sqrt().view(-1, *[1] * (x.dim() - 1)) * weight + bias


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
@torch.no_grad()
def test_pqns_network_is_the_papers(amp):
    """Three convolutions and a product, each with its norm and relu; a product."""
    torch.manual_seed(0)
    network = pqn.QNetwork(6).to(memory_format=torch.channels_last)
    for p in network.parameters():
        p += 0.1 * p.abs().mean().clamp(min=0.1) * torch.randn_like(p)  # biases and the norms' weights too
    frames = random_frames(2)

    def expected():
        x = frames.double() / 255
        for i in (0, 3, 6):
            x = torch.relu(rounded(slow_norm(network[i + 1], slow_convolution(network[i], x))))
        x = slow_product(network[9], x.movedim(1, -1).flatten(1))
        return slow_head(network[12], torch.relu(rounded(slow_norm(network[10], x))))

    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        values = expected()
    pixels = interleaved(frames)
    assert values.std() > 0.1 and torch.equal(pixels, frames) and pixels.movedim(1, -1).is_contiguous()
    for obs in (frames, pixels):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            ours = network(obs)
        # Where sums in another order round to the other side, what follows is off by 2**-8.
        torch.testing.assert_close(ours, values.float(), rtol=1e-4, atol=5e-3 if amp else 1e-4)
        assert not amp or (ours - values).abs().mean() < 0.3 * (expected() - values).abs().mean()


def test_minibatches_are_channels_last():
    """Where they are not, every convolution of an update rearranges its input."""
    args = SimpleNamespace(num_steps=5, num_envs=3)
    for module in (ppo, pqn):
        rollout = module.Rollout.allocate(torch.zeros(3, 4, 84, 84, dtype=torch.uint8), args)
        rollout.obs.copy_(random_frames(*rollout.obs.shape[:2]))
        rollout.values.copy_(torch.arange(18.0).view(6, 3))
        minibatch = rollout.minibatch(torch.tensor([7, 2]))
        assert minibatch.obs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(minibatch.obs, torch.stack([rollout.obs[2, 1], rollout.obs[0, 2]]))
        assert minibatch.values.tolist() == [7.0, 2.0]
