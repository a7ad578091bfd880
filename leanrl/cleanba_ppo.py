"""Proximal Policy Optimization (PPO), distributed: actors on threads, learners that sum their gradients.

Papers: https://arxiv.org/abs/1707.06347 (PPO), https://arxiv.org/abs/2310.00036 (Cleanba, whose flags and
hyperparameters these are). What differs: rollouts carry the version of the parameters that produced them, minibatches
are drawn at random within logical shards that do not depend on the layout, episodes that run out of time are
bootstrapped, and steps that only reset an environment are left out of the loss. The runtime is leanrl/sebulba/.

    python leanrl/cleanba_ppo.py --env-id Breakout-v5                                # actor and learner on one device
    python leanrl/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2       # an actor and two learners
    python leanrl/cleanba_ppo.py --env-id CartPole-v1 --device cpu --learner-device-ids 0 1 --total-timesteps 500000
    torchrun --nproc-per-node 2 leanrl/cleanba_ppo.py --learner-device-ids 0 1 --compile

Layouts, launching and failures: doc/distributed.md
Measured speed and learning curves: doc/benchmarks/cleanba.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from leanrl.sebulba.algorithm import Algorithm, Shards, Update
from leanrl.sebulba.args import SebulbaArgs
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.launch import start
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.randomness import shard_generator
from leanrl.sebulba.rollout import Rollout
from leanrl.support.cli import run_script
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.executables import WARMUP_CALLS, make_executable
from leanrl.support.optim import FlatAdam, clip_grad_norm
from leanrl.support.scan import linear_recurrence


@dataclass
class Args(SebulbaArgs):
    env_id: str = "Breakout-v5"
    """EnvPool environment with discrete actions"""
    protocol: Literal["cleanba", "cleanrl"] = "cleanba"
    """how Atari games are played: sticky actions, all 18 actions and whole games, or lost lives that end episodes"""
    total_timesteps: int = 50_000_000
    """environment steps of the whole run"""
    seed: int = 1
    """seed of the environments, the network, the minibatches and the exploration"""
    torso: Literal["auto", "impala", "nature", "mlp"] = "auto"
    """network: IMPALA's residual one or DQN's for images, two layers for other observations; auto: impala or mlp"""
    channels: tuple[int, ...] = (16, 32, 32)
    """channels of the stages of the impala torso"""
    hidden: int = 256
    """width behind the impala torso (nature: 512, mlp: two layers of 64)"""

    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """optimiser steps per epoch"""
    gradient_accumulation_steps: int = 1
    """parts of a minibatch, computed one after the other to save memory; each normalises its own advantages"""
    update_epochs: int = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each shard's part of a minibatch"""
    clip_coef: float = 0.1
    """clip range of the probability ratio"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.channels = tuple(self.channels)


def validate(args: Args) -> None:
    """Raises UsageError on the first argument of the algorithm that cannot work."""
    require_at_least(args, 1, "total_timesteps", "num_steps", "num_minibatches", "update_epochs", "hidden")
    require_at_least(args, 1, "gradient_accumulation_steps")
    require_at_least(args, 0, "seed", "clip_coef", "ent_coef", "vf_coef")
    require_positive(args, "learning_rate", "max_grad_norm")
    require_unit_interval(args, "gamma", "gae_lambda")
    if not args.channels or min(args.channels) < 1:
        raise bad("channels", args.channels, "needs at least one stage, of at least 1 channel")


def validate_shards(args: Args, layout: Layout) -> None:
    """Raises UsageError unless a shard divides into minibatches and those into their parts."""
    num_rows, num_parts = layout.shard_size * args.num_steps, args.num_minibatches * args.gradient_accumulation_steps
    if num_rows % num_parts:
        needed = f"times --gradient-accumulation-steps {args.gradient_accumulation_steps} must divide"
        raise bad("num_minibatches", args.num_minibatches, f"{needed} the {num_rows} steps of a shard's rollout")
    if args.norm_adv and num_rows // num_parts < 2:
        raise bad("num_minibatches", args.num_minibatches, "leaves minibatches of 1, which --norm-adv cannot normalise")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def conv3x3(in_channels: int, out_channels: int) -> nn.Conv2d:
    """A 3x3 convolution that keeps the size, initialised as Flax does: a normal distribution cut off at 2 sigma."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    std = (9 * in_channels) ** -0.5 / 0.87962566103423978  # the deviation of a standard normal one, cut off so
    nn.init.trunc_normal_(conv.weight, std=std, a=-2 * std, b=2 * std)
    nn.init.zeros_(conv.bias)
    return conv


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = conv3x3(channels, channels)
        self.conv1 = conv3x3(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(F.relu(self.conv0(F.relu(x))))


class ConvSequence(nn.Module):
    """A convolution, max-pooling to half the size, and two residual blocks: [B, C, H, W] -> [B, C', H / 2, W / 2]"""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = conv3x3(in_channels, channels)
        self.blocks = nn.Sequential(ResidualBlock(channels), ResidualBlock(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        # TensorFlow's and Flax's SAME: an even size is padded at the end only, an odd one on both sides.
        height, width = (1 - size % 2 for size in x.shape[-2:])
        x = F.pad(x, (1 - width, 1, 1 - height, 1), value=-torch.inf)
        return self.blocks(F.max_pool2d(x, 3, stride=2))


class ImpalaCNN(nn.Sequential):
    """The larger network of https://arxiv.org/abs/1802.01561 (figure 3), no LSTM: bytes [B, C, H, W] -> [B, hidden]"""

    def __init__(self, obs_shape: Sequence[int], channels: Sequence[int], hidden: int) -> None:
        in_channels, height, width = obs_shape
        stages = []
        for out_channels in channels:
            stages.append(ConvSequence(in_channels, out_channels))
            in_channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        super().__init__(
            *stages,
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(in_channels * height * width, hidden)),
            nn.ReLU(),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        # On a CPU, convolutions are up to twice as fast with the channels last.
        return super().forward((obs / 255.0).contiguous(memory_format=torch.channels_last))


class BlockConv(nn.Conv2d):
    """A convolution of bytes / 255 at a stride of 4 pixels, computed as one of blocks of 4 x 4 pixels at a stride of 1.

    A pixel has a few channels, of which convolutions are slow; a block has 16 times as many.
    """

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        channels, height, width = obs.shape[1:]
        # Four pixels of a row are one number here, a quarter as many to move.
        rows = obs.view(torch.int32).view(-1, channels, height // 4, 4, width // 4).permute(0, 2, 4, 1, 3)
        blocks = rows.reshape(-1, height // 4, width // 4, channels * 4).view(torch.uint8).permute(0, 3, 1, 2)
        return F.conv2d(blocks.float(), F.pixel_unshuffle(self.weight, 4) / 255.0, self.bias)


class NatureCNN(nn.Sequential):
    """DQN's network (https://www.nature.com/articles/nature14236): bytes [B, C, 84, 84] -> [B, 512]"""

    def __init__(self, obs_shape: Sequence[int]) -> None:
        super().__init__(
            layer_init(BlockConv(obs_shape[0], 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )


class ImageAgent(nn.Module):
    """Policy and value on one torso: observations [B, C, H, W] of bytes -> logits [B, num_actions], values [B]"""

    def __init__(self, torso: nn.Module, features: int, num_actions: int) -> None:
        super().__init__()
        self.torso = torso
        self.actor = layer_init(nn.Linear(features, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(features, 1), std=1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.torso(obs)
        # A value in bf16 would have three digits.
        with torch.autocast(obs.device.type, enabled=False):
            hidden = hidden.float()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)


class VectorAgent(nn.Module):
    """Separate tanh networks for policy and value: observations [B, ...] -> logits [B, num_actions], values [B]"""

    def __init__(self, obs_dim: int, num_actions: int) -> None:
        super().__init__()
        self.actor = self._mlp(obs_dim, num_actions, std=0.01)
        self.critic = self._mlp(obs_dim, 1, std=1.0)

    def _mlp(self, obs_dim: int, out_dim: int, std: float) -> nn.Sequential:
        return nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, out_dim), std=std),
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        obs = obs.flatten(1).float()
        return self.actor(obs), self.critic(obs).squeeze(-1)


def make_agent(space: gym.spaces.Box, num_actions: int, args: Args) -> nn.Module:
    """The network that ``--torso`` names, or that the observations ask for. UsageError where they do not fit."""
    is_image = space.dtype == np.uint8 and len(space.shape) == 3
    torso = args.torso if args.torso != "auto" else "impala" if is_image else "mlp"
    if torso == "mlp":
        return VectorAgent(int(np.prod(space.shape)), num_actions)
    if not is_image or (torso == "nature" and space.shape[1:] != (84, 84)):
        raise bad("torso", torso, f"is for images; observations are {space.dtype} of shape {space.shape}")
    if torso == "nature":
        return ImageAgent(NatureCNN(space.shape), 512, num_actions)
    return ImageAgent(ImpalaCNN(space.shape, args.channels, args.hidden), args.hidden, num_actions)


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438, equation 16), as a scan backwards in time.

    ``values[t + 1]`` values the observation that step t led to, the true last one where step t ended an episode: it is
    bootstrapped from unless the episode terminated, and ``dones`` (terminated or truncated) ends the sum. Advantages
    of steps that only reset an environment mean nothing, and reach no other step.

    Args:
        rewards, terminations, dones: [T, N]; the flags as floats.
        values: [T + 1, N].

    Returns:
        advantages [T, N]
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminations) - values[:-1]
    decays = gamma * gae_lambda * (1.0 - dones)
    return linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0)


def weighted_mean(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` over the rows that count (weight 1)."""
    return (x * weights).sum() / weights.sum().clamp(min=1.0)


def ppo_loss(
    logits: torch.Tensor,
    newvalue: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss over one minibatch.

    Args:
        logits, newvalue: [B, num_actions] and [B], what the agent says now.
        actions: [B] int64; the others [B]. ``weights`` is 0 for steps that only reset an environment, else 1.

    Returns:
        the loss, and [6]: policy loss, value loss, entropy, old_approx_kl, approx_kl, clipfrac (detached).
    """
    all_logprobs = logits.float().log_softmax(1)
    newlogprob = all_logprobs.gather(1, actions.unsqueeze(1)).squeeze(1)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()

    # approx_kl: http://joschu.net/blog/kl-approx.html
    old_approx_kl = weighted_mean(-logratio, weights)
    approx_kl = weighted_mean((ratio - 1) - logratio, weights)
    clipfrac = weighted_mean(((ratio - 1.0).abs() > args.clip_coef).float(), weights)

    if args.norm_adv:
        mean = weighted_mean(advantages, weights)
        # Unbiased, as torch.std is.
        variance = (weights * (advantages - mean) ** 2).sum() / (weights.sum() - 1).clamp(min=1.0)
        advantages = (advantages - mean) / (variance.sqrt() + 1e-8)

    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = weighted_mean(torch.max(pg_loss1, pg_loss2), weights)
    v_loss = 0.5 * weighted_mean((newvalue.float() - returns) ** 2, weights)
    entropy = weighted_mean(-(all_logprobs.exp() * all_logprobs).sum(1), weights)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    parts = torch.stack([pg_loss, v_loss, entropy, old_approx_kl, approx_kl, clipfrac])
    return loss, parts.detach()


LOSS_NAMES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


# ------------------------------------------------------------------------------------------------------------ UPDATE


class Batch(NamedTuple):
    """A shard's rollout with its targets, at addresses that never change."""

    rollout: Rollout
    advantages: torch.Tensor  # [T, n], like the next two
    returns: torch.Tensor
    weights: torch.Tensor  # 0 where a step only reset its environment

    @classmethod
    def of(cls, rollout: Rollout) -> "Batch":
        return cls(rollout, *(torch.zeros_like(rollout.rewards) for _ in range(3)))

    def minibatch(self, inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows ``inds`` of obs, actions, logprobs, advantages, returns, weights; steps and environments flattened."""
        columns = (self.rollout.actions, self.rollout.logprobs, self.advantages, self.returns, self.weights)
        return self.rollout.obs[:-1].flatten(0, 1)[inds], *(column.flatten()[inds] for column in columns)


def fill_targets(batch: Batch, get_value: Callable[[torch.Tensor], torch.Tensor], args: Args) -> None:
    """Advantages, returns and weights of a shard, from the values that the actors computed.

    Args:
        get_value: [n, ...] -> [n]; values the observations that the last step led to, with the learner's parameters:
            those that the actors played with at policy lag 0, newer ones at more.
    """
    rollout = batch.rollout
    values = torch.cat([rollout.values, get_value(rollout.obs[-1]).unsqueeze(0)])
    terminations, dones = rollout.terminations.float(), rollout.dones.float()
    advantages = compute_gae(rollout.rewards, values, terminations, dones, args.gamma, args.gae_lambda)
    batch.advantages.copy_(advantages)
    batch.returns.copy_(advantages + rollout.values)
    batch.weights.copy_(1.0 - rollout.resets.float())


def make_optimizer(agent: nn.Module, args: Args) -> FlatAdam:
    return FlatAdam(agent, lr=args.learning_rate, eps=1e-5)


def make_update(agent: nn.Module, optimizer: FlatAdam, shards: Shards, args: Args, device: torch.device) -> Update:
    """A rollout's epochs of minibatches; each minibatch takes a part of every shard, and their gradients are summed."""
    batches = [Batch.of(rollout) for rollout in shards.rollouts]
    num_rows = batches[0].advantages.numel()
    num_parts = args.num_minibatches * args.gradient_accumulation_steps
    num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    # The mean over shards and accumulated parts of losses that are means themselves.
    scale = 1.0 / (shards.total * args.gradient_accumulation_steps)

    def get_value(obs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16"):
            return agent(obs)[1].float()

    def make_gradient(batch: Batch) -> Callable[[torch.Tensor], torch.Tensor]:
        def gradient(inds: torch.Tensor) -> torch.Tensor:
            obs, *rest = batch.minibatch(inds)

            def loss_fn(params: torch.Tensor):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16"):
                    outputs = optimizer.apply(params, obs)
                loss, parts = ppo_loss(*outputs, *rest, args)
                return scale * loss, scale * parts

            # torch.func instead of .backward(), which breaks the graph in three.
            grad, parts = torch.func.grad(loss_fn, has_aux=True)(optimizer.params)
            return torch.cat([grad, parts])

        return gradient

    def step(summed: torch.Tensor) -> torch.Tensor:
        grad, parts = summed.split([len(optimizer.params), len(LOSS_NAMES)])
        optimizer.step(clip_grad_norm(grad, args.max_grad_norm))
        return parts.clone()

    get_value, step, *gradients = make_executables([get_value, step, *map(make_gradient, batches)], args, device)

    def warm_up() -> None:
        inds = torch.arange(num_rows // num_parts, device=device)
        for _ in range(WARMUP_CALLS if args.compile or args.cudagraphs else 1):
            fill_targets(batches[0], get_value, args)
            for gradient in gradients:
                step(gradient(inds))

    def update(number: int) -> torch.Tensor:
        if args.anneal_lr:
            optimizer.lr.fill_(args.learning_rate * (1.0 - (number - 1.0) / num_iterations))
        for batch in batches:
            fill_targets(batch, get_value, args)
        losses = torch.zeros(len(LOSS_NAMES), device=device)
        for epoch in range(args.update_epochs):
            generators = [
                shard_generator(args.seed, shard, (number - 1) * args.update_epochs + epoch) for shard in shards.numbers
            ]
            inds = [torch.from_numpy(generator.permutation(num_rows)).to(device) for generator in generators]
            b_inds = [shard_inds.view(args.num_minibatches, -1) for shard_inds in inds]
            for minibatch in range(args.num_minibatches):
                vectors = [
                    sum_in_order(map(gradient, mb_inds[minibatch].chunk(args.gradient_accumulation_steps)))
                    for gradient, mb_inds in zip(gradients, b_inds, strict=True)
                ]
                losses += step(shards.sum_over(vectors))
        return losses / (args.update_epochs * args.num_minibatches)

    return Update(warm_up, update, num_steps=args.update_epochs * args.num_minibatches)


# ------------------------------------------------------------------------------------------------------------ ACTING


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The policy of a saved model: observations [N, ...] -> actions [N], sampled as in training.

    The likeliest action alone can stay for ever where it does nothing, say before Breakout's next ball.
    """
    agent = make_agent(envs.single_observation_space, int(envs.single_action_space.n), Args(**model["network"]))
    agent.load_state_dict(model["agent"])
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        logits, _ = agent(torch.from_numpy(obs))
        return torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(functions: Sequence[Callable], args: Args, device: torch.device) -> list[Callable]:
    """``functions``, compiled and captured as the flags say. Actors do the same with their inference."""
    return [make_executable(fn, device, args.compile, args.cudagraphs) for fn in functions]


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    algorithm = Algorithm(
        make_agent=make_agent,
        make_optimizer=make_optimizer,
        make_update=make_update,
        validate=validate_shards,
        network_flags=("torso", "channels", "hidden"),
        loss_names=LOSS_NAMES,
    )
    start(args, __file__, algorithm)


if __name__ == "__main__":
    run_script(main, Args, __file__)
