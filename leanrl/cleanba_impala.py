"""IMPALA, distributed: actors on threads, learners that correct for the actors' lag with V-trace.

Papers: https://arxiv.org/abs/1802.01561 (IMPALA), https://arxiv.org/abs/2310.00036 (Cleanba, whose flags and
hyperparameters these are). What differs: rewards, ends and masks describe the transition that their action made,
episodes that run out of time are bootstrapped, and the summed gradient does not depend on the number of learners. The
runtime is leanrl/sebulba/; its sibling, with which it shares all but targets, loss and update, is cleanba_ppo.py.

    python leanrl/cleanba_impala.py --env-id Breakout-v5                             # actor and learner on one device
    python leanrl/cleanba_impala.py --actor-device-ids 0 --learner-device-ids 1 2    # an actor and two learners
    python leanrl/cleanba_impala.py --env-id Catch-v0 --device cpu --total-timesteps 500000
    torchrun --nproc-per-node 2 leanrl/cleanba_impala.py --learner-device-ids 0 1 --compile

Layouts, launching and failures: doc/distributed.md
Measured speed and learning curves: doc/benchmarks/cleanba.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
from leanrl.sebulba.rollout import Rollout
from leanrl.support.cli import run_script
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.executables import WARMUP_CALLS, make_executable
from leanrl.support.optim import FlatRMSProp, clip_grad_norm
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
    """seed of the environments, the network and the exploration"""
    torso: Literal["auto", "impala", "nature", "mlp"] = "auto"
    """network: IMPALA's residual one or DQN's for images, two layers for other observations; auto: impala or mlp"""
    channels: tuple[int, ...] = (16, 32, 32)
    """channels of the stages of the impala torso"""
    hidden: int = 256
    """width behind the impala torso (nature: 512, mlp: two layers of 64)"""

    policy_lag: int = 1
    """rollout r is produced by the parameters after r - 1 - POLICY_LAG updates; 0 is synchronous"""

    learning_rate: float = 6e-4
    """learning rate of RMSProp"""
    num_steps: int = 20
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    num_minibatches: int = 4
    """optimiser steps per rollout, each on a part of the environments of every shard"""
    gradient_accumulation_steps: int = 1
    """parts of a minibatch, computed one after the other to save memory"""
    rho_bar: float = 1.0
    """rho-bar: the importance weights of temporal differences are truncated here"""
    c_bar: float = 1.0
    """c-bar: the importance weights of traces are truncated here"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 40.0
    """gradients are clipped to this norm"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.channels = tuple(self.channels)


def validate(args: Args) -> None:
    """Raises UsageError on the first argument of the algorithm that cannot work."""
    require_at_least(
        args, 1, "total_timesteps", "num_steps", "num_minibatches", "hidden", "gradient_accumulation_steps"
    )
    require_at_least(args, 0, "seed", "ent_coef", "vf_coef")
    require_positive(args, "learning_rate", "max_grad_norm", "rho_bar", "c_bar")
    require_unit_interval(args, "gamma")
    if not args.channels or min(args.channels) < 1:
        raise bad("channels", args.channels, "needs at least one stage, of at least 1 channel")


def validate_shards(args: Args, layout: Layout) -> None:
    """Raises UsageError unless the environments of a shard divide into minibatches and those into their parts."""
    if layout.shard_size % (args.num_minibatches * args.gradient_accumulation_steps):
        needed = f"times --gradient-accumulation-steps {args.gradient_accumulation_steps} must divide"
        raise bad("num_minibatches", args.num_minibatches, f"{needed} the {layout.shard_size} environments of a shard")


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


def vtrace(
    log_rhos: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace targets (the paper's equation 1) and the advantages of its policy gradient, as a scan backwards in time.

    ``values[t + 1]`` values the observation that step t led to, the true last one where step t ended an episode: it is
    bootstrapped from unless the episode terminated, and ``dones`` (terminated or truncated) ends the trace. What is
    computed for steps that only reset an environment means nothing, and reaches no other step.

    Args:
        log_rhos: [T, N], log of the learner's probability of the action over the actor's.
        rewards, terminations, dones: [T, N]; the flags as floats.
        values: [T + 1, N].

    Returns:
        vs [T, N] and advantages [T, N]
    """
    rhos = log_rhos.exp()
    clipped_rhos, cs = rhos.clamp(max=rho_bar), rhos.clamp(max=c_bar)
    discounts = gamma * (1.0 - terminations)
    deltas = clipped_rhos * (rewards + discounts * values[1:] - values[:-1])
    decays = gamma * (1.0 - dones) * cs
    vs = values[:-1] + linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0)
    # After the last step of an episode, or of the rollout, the best that is known of the next state is its value.
    next_vs = torch.cat([vs[1:], values[-1:]])
    next_vs = torch.where(dones > 0, values[1:], next_vs)
    return vs, clipped_rhos * (rewards + discounts * next_vs - values[:-1])


def impala_loss(
    logits: torch.Tensor,
    values: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    rewards: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    weights: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's loss (section 4.2), summed over the steps.

    Args:
        logits, values: [T + 1, N, num_actions] and [T + 1, N], what the agent says now.
        actions: [T, N] int64; the others [T, N] floats, ``logprobs`` of the policy that acted. ``weights`` is 0 for
            steps that only reset an environment, else 1.

    Returns:
        the loss, and [3]: policy loss, value loss, entropy (sums, detached).
    """
    values = values.float()
    all_logprobs = logits[:-1].float().log_softmax(-1)
    newlogprob = all_logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    vs, advantages = vtrace(
        (newlogprob - logprobs).detach(),
        rewards,
        values.detach(),
        terminations,
        dones,
        args.gamma,
        args.rho_bar,
        args.c_bar,
    )
    pg_loss = -(advantages * newlogprob * weights).sum()
    v_loss = 0.5 * ((vs - values[:-1]) ** 2 * weights).sum()
    entropy = (-(all_logprobs.exp() * all_logprobs).sum(-1) * weights).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    return loss, torch.stack([pg_loss, v_loss, entropy]).detach()


LOSS_NAMES = ("policy_loss", "value_loss", "entropy")


# ------------------------------------------------------------------------------------------------------------ UPDATE


def minibatch(rollout: Rollout, envs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Columns ``envs`` of obs, actions, logprobs, rewards, terminations, dones, weights."""
    columns = (rollout.obs, rollout.actions, rollout.logprobs, rollout.rewards)
    flags = (rollout.terminations.float(), rollout.dones.float(), 1.0 - rollout.resets.float())
    return tuple(column.index_select(1, envs) for column in (*columns, *flags))


def make_optimizer(agent: nn.Module, args: Args) -> FlatRMSProp:
    return FlatRMSProp(agent, lr=args.learning_rate, alpha=0.99, eps=0.01)


def make_update(agent: nn.Module, optimizer: FlatRMSProp, shards: Shards, args: Args, device: torch.device) -> Update:
    """One pass over a rollout; a minibatch takes some environments of every shard, and their gradients are summed."""
    num_envs = shards.rollouts[0].actions.shape[1]
    num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    # [num_minibatches, gradient_accumulation_steps, n]
    mb_envs = torch.arange(num_envs, device=device).view(args.num_minibatches, args.gradient_accumulation_steps, -1)
    # The gradient is of the sum of the losses, their log points are of the mean.
    num_rows = args.num_steps * num_envs * shards.total // args.num_minibatches

    def make_gradient(rollout: Rollout) -> Callable[[torch.Tensor], torch.Tensor]:
        def gradient(envs: torch.Tensor) -> torch.Tensor:
            obs, *rest = minibatch(rollout, envs)

            def loss_fn(params: torch.Tensor):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16"):
                    logits, values = optimizer.apply(params, obs.flatten(0, 1))
                shape = obs.shape[:2]
                return impala_loss(logits.view(*shape, -1), values.view(shape), *rest, args)

            # torch.func instead of .backward(), which breaks the graph in three.
            grad, losses = torch.func.grad(loss_fn, has_aux=True)(optimizer.params)
            return torch.cat([grad, losses / num_rows])

        return gradient

    def step(summed: torch.Tensor) -> torch.Tensor:
        grad, losses = summed.split([len(optimizer.params), len(LOSS_NAMES)])
        optimizer.step(clip_grad_norm(grad, args.max_grad_norm))
        return losses.clone()

    step, *gradients = make_executables([step, *map(make_gradient, shards.rollouts)], args, device)

    def warm_up() -> None:
        for _ in range(WARMUP_CALLS if args.compile or args.cudagraphs else 1):
            for gradient in gradients:
                step(gradient(mb_envs[0, 0]))

    def update(number: int) -> torch.Tensor:
        if args.anneal_lr:
            optimizer.lr.fill_(args.learning_rate * (1.0 - (number - 1.0) / num_iterations))
        losses = torch.zeros(len(LOSS_NAMES), device=device)
        for envs in mb_envs:
            losses += step(shards.sum_over([sum_in_order(map(gradient, envs)) for gradient in gradients]))
        return losses / args.num_minibatches

    return Update(warm_up, update, num_steps=args.num_minibatches)


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
