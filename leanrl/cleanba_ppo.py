"""Proximal Policy Optimization (PPO), distributed: actors on threads, learners that sum their gradients.

Papers: https://arxiv.org/abs/1707.06347 (PPO), https://arxiv.org/abs/2310.00036 (Cleanba, the source of flags
and hyperparameters). What differs: 48 environments a thread and, by default, no policy lag; minibatches are drawn at
random within shards, which --num-shards keeps equal in every layout; truncated episodes are bootstrapped; and steps
that only reset an environment are left out of the loss. The runtime is leanrl/sebulba/.

    python leanrl/cleanba_ppo.py --env-id Breakout-v5                                # actor and learner on one device
    python leanrl/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 --policy-lag 1   # act while others learn
    python leanrl/cleanba_ppo.py --env-id CartPole-v1 --device cpu --learner-device-ids 0 1 --total-timesteps 500000
    python leanrl/cleanba_ppo.py --env-id HalfCheetah-v5 --device cpu --local-num-envs 4 --num-steps 256 \\
        --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --clip-coef 0.2 --ent-coef 0 \\
        --total-timesteps 1000000                                                    # continuous actions
    torchrun --nproc-per-node 2 leanrl/cleanba_ppo.py --learner-device-ids 0 1 --compile

Layouts, launching and failures: doc/distributed.md
Measured speed and learning curves: doc/benchmarks/cleanba.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Distribution, Independent, Normal

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.args import SebulbaArgs
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.randomness import action_noise, policy_size, shard_generator
from leanrl.sebulba.rollout import Rollout
from leanrl.sebulba.start import Start, resolve_start
from leanrl.sebulba.supervisor import supervise
from leanrl.sebulba.worker import join
from leanrl.support.cli import run_script
from leanrl.support.devices import one_thread
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.executables import WARMUP_CALLS, make_executable
from leanrl.support.layers import Float32Linear
from leanrl.support.normalization import RunningMoments
from leanrl.support.optim import Adam
from leanrl.support.pooling import max_pool_same
from leanrl.support.scan import linear_recurrence


@dataclass
class Args(SebulbaArgs):
    env_id: str = "Breakout-v5"
    """environment of EnvPool or Gymnasium (see --env-backend). With continuous actions, observations and rewards are
    normalised, over all environments"""
    protocol: Literal["cleanba", "cleanrl"] = "cleanba"
    """Atari rules; cleanba: sticky actions, all 18 actions and whole games; cleanrl: a lost life ends an episode"""
    total_timesteps: int = 50_000_000
    """environment steps of the whole run, rounded down to whole rollouts"""
    seed: int = 1
    """seed of the environments, the network, the minibatches and the exploration"""
    torso: Literal["auto", "impala", "nature", "mlp"] = "auto"
    """network: IMPALA's residual network or DQN's for images, an MLP for other observations; auto: impala or mlp"""
    channels: tuple[int, ...] = (16, 32, 32)
    """channels of the stages of the impala torso"""
    hiddens: tuple[int, ...] = (256,)
    """widths of the linear layers of the impala torso (fixed for nature: 512, and for mlp: two layers of 64)"""

    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """optimiser steps per epoch"""
    gradient_accumulation_steps: int = 1
    """microbatches per minibatch, computed one by one to save memory; each normalises its own advantages"""
    update_epochs: int = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise advantages, within each shard's part of a minibatch"""
    clip_coef: float = 0.1
    """clip range of the probability ratio"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument of the algorithm that cannot work."""
    require_at_least(args, 1, "total_timesteps", "num_steps", "num_minibatches", "update_epochs")
    require_at_least(args, 1, "gradient_accumulation_steps")
    require_at_least(args, 0, "seed", "clip_coef", "ent_coef", "vf_coef")
    require_positive(args, "learning_rate", "max_grad_norm")
    require_unit_interval(args, "gamma", "gae_lambda")
    if not args.channels or min(args.channels) < 1:
        raise bad("channels", args.channels, "needs at least one stage, of at least 1 channel")
    if not args.hiddens or min(args.hiddens) < 1:
        raise bad("hiddens", args.hiddens, "needs at least one layer, of at least 1 unit")


def validate_shards(args: Args, layout: Layout) -> None:
    """Raises UsageError unless a shard's steps divide into minibatches, and those into microbatches."""
    num_rows, num_parts = layout.shard_size * args.num_steps, args.num_minibatches * args.gradient_accumulation_steps
    if num_rows % num_parts:
        needed = f"times --gradient-accumulation-steps {args.gradient_accumulation_steps} must divide"
        raise bad("num_minibatches", args.num_minibatches, f"{needed} the {num_rows} steps of a shard's rollout")
    if args.norm_adv and num_rows // num_parts < 2:
        raise bad(
            "num_minibatches", args.num_minibatches, "leaves microbatches of 1 step per shard: too few for --norm-adv"
        )


# ---------------------------------------------------------------------------------------------------------- NETWORKS


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def conv3x3(in_channels: int, out_channels: int) -> nn.Conv2d:
    """A 3x3 convolution that keeps the size, initialised as in Flax: a normal distribution truncated at 2 sigma."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    std = (9 * in_channels) ** -0.5 / 0.87962566103423978  # std of a normal truncated at ±2
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
    """A convolution, max-pooling to half the size, and two residual blocks: [B, C, H, W] -> [B, C', ⌈H/2⌉, ⌈W/2⌉]"""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = conv3x3(in_channels, channels)
        self.blocks = nn.Sequential(ResidualBlock(channels), ResidualBlock(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(max_pool_same(self.conv(x)))


class ImpalaCNN(nn.Sequential):
    """Figure 3's larger network (https://arxiv.org/abs/1802.01561), no LSTM: uint8 [B, C, H, W] -> [B, hiddens[-1]]"""

    def __init__(self, obs_shape: Sequence[int], channels: Sequence[int], hiddens: Sequence[int]) -> None:
        in_channels, height, width = obs_shape
        layers = []
        for out_channels in channels:
            layers.append(ConvSequence(in_channels, out_channels))
            in_channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        layers += [nn.ReLU(), nn.Flatten()]
        in_features = in_channels * height * width
        for out_features in hiddens:
            layers += [layer_init(nn.Linear(in_features, out_features)), nn.ReLU()]
            in_features = out_features
        super().__init__(*layers)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs / 255.0)


class NatureCNN(nn.Sequential):
    """DQN's network (https://www.nature.com/articles/nature14236): uint8 [B, C, 84, 84] -> [B, 512]"""

    def __init__(self, obs_shape: Sequence[int]) -> None:
        super().__init__(
            layer_init(nn.Conv2d(obs_shape[0], 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs / 255.0)


class ImageAgent(nn.Module):
    """Policy and value heads on one torso: uint8 [B, C, H, W] -> logits [B, num_actions], values [B]"""

    def __init__(self, torso: nn.Module, features: int, num_actions: int) -> None:
        super().__init__()
        self.torso = torso
        self.actor = layer_init(nn.Linear(features, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(features, 1), std=1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.torso(obs)
        # bf16 keeps 8 significant bits: too few for a value.
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
            layer_init(Float32Linear(64, out_dim), std=std),
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        obs = obs.flatten(1).float()
        return self.actor(obs), self.critic(obs).squeeze(-1)


class Gaussian(NamedTuple):
    """A policy of continuous actions: independent normal distributions, [B, action_dim] each."""

    mean: torch.Tensor
    logstd: torch.Tensor


class ContinuousAgent(VectorAgent):
    """A VectorAgent for continuous actions: observations [B, ...] -> a Gaussian, values [B]

    The standard deviation does not depend on the state. Observations are normalised. Their moments, and those of the
    discounted returns, belong to the network: they are saved, and sent to the actors, with its parameters.
    """

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__(obs_dim, action_dim)
        self.actor_logstd = nn.Parameter(torch.zeros(1, action_dim))
        self.obs_moments, self.return_moments = RunningMoments((obs_dim,), 0.0), RunningMoments((1,), 0.0)

    def forward(self, obs: torch.Tensor) -> tuple[Gaussian, torch.Tensor]:
        mean, values = super().forward(self.obs_moments(obs.flatten(1)))
        return Gaussian(mean, self.actor_logstd.expand_as(mean)), values


# The flags that ``make_agent`` reads; they are saved in model.pt.
NETWORK_FLAGS = ("torso", "channels", "hiddens")


def make_agent(space: gym.spaces.Box, action_space: gym.Space, args: Args) -> nn.Module:
    """The network that ``--torso`` names, or that suits the spaces. UsageError if they do not fit."""
    is_image = space.dtype == np.uint8 and len(space.shape) == 3
    torso = args.torso if args.torso != "auto" else "impala" if is_image else "mlp"
    is_continuous, out_dim = isinstance(action_space, gym.spaces.Box), policy_size(action_space)
    if torso == "mlp":
        return (ContinuousAgent if is_continuous else VectorAgent)(int(np.prod(space.shape)), out_dim)
    if is_continuous:
        raise bad("env_id", args.env_id, f"has continuous actions: use --torso mlp, not {torso}")
    if not is_image or (torso == "nature" and space.shape[1:] != (84, 84)):
        raise bad("torso", torso, f"is for images; observations are {space.dtype} of shape {space.shape}")
    if torso == "nature":
        return ImageAgent(NatureCNN(space.shape), 512, out_dim)
    return ImageAgent(ImpalaCNN(space.shape, args.channels, args.hiddens), args.hiddens[-1], out_dim)


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

    ``values[t + 1]`` is the value of the observation after step t, the final one if step t ended an episode. It is the
    bootstrap value unless the episode terminated; ``dones`` (terminated or truncated) ends the sum. Advantages of steps
    that only reset an environment are meaningless, and affect no other step.

    Args:
        rewards, terminations, dones: [T, N]; the flags as floats.
        values: [T + 1, N].

    Returns:
        advantages [T, N]
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminations) - values[:-1]
    decays = gamma * gae_lambda * (1.0 - dones)
    return linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` [B] over the rows where ``mask`` [B] is 1."""
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


class Minibatch(NamedTuple):
    """Steps to learn from, each [B, ...]."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor  # 0 where a step only reset its environment, else 1


class Losses(NamedTuple):
    """What an update logs, each a 0-d tensor."""

    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    old_approx_kl: torch.Tensor
    approx_kl: torch.Tensor
    clipfrac: torch.Tensor


def distribution(policy: torch.Tensor | Gaussian) -> Distribution:
    """The distribution of actions, from logits [B, num_actions] or a Gaussian."""
    if isinstance(policy, Gaussian):
        normal = Normal(policy.mean, policy.logstd.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)  # sums over the components of an action
    return Categorical(logits=policy, validate_args=False)


def ppo_loss(agent: nn.Module, minibatch: Minibatch, args: Args) -> tuple[torch.Tensor, Losses]:
    """PPO's clipped loss over one minibatch, and what is logged (detached)."""
    obs, actions, logprobs, advantages, returns, mask = minibatch
    policy, newvalue = agent(obs)
    probs = distribution(policy)
    logratio = probs.log_prob(actions) - logprobs
    ratio = logratio.exp()

    # approx_kl: http://joschu.net/blog/kl-approx.html
    old_approx_kl = masked_mean(-logratio, mask)
    approx_kl = masked_mean((ratio - 1) - logratio, mask)
    clipfrac = masked_mean(((ratio - 1.0).abs() > args.clip_coef).float(), mask)

    if args.norm_adv:
        mean = masked_mean(advantages, mask)
        # Unbiased, as torch.std is.
        variance = (mask * (advantages - mean) ** 2).sum() / (mask.sum() - 1).clamp(min=1.0)
        advantages = (advantages - mean) / (variance.sqrt() + 1e-8)

    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = masked_mean(torch.max(pg_loss1, pg_loss2), mask)
    v_loss = 0.5 * masked_mean((newvalue - returns) ** 2, mask)
    entropy = masked_mean(probs.entropy(), mask)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    losses = pg_loss, v_loss, entropy, old_approx_kl, approx_kl, clipfrac
    return loss, Losses(*(x.detach() for x in losses))


# ------------------------------------------------------------------------------------------------------------ UPDATE


class Batch(Minibatch):
    """All steps of a shard's rollout with their targets, [T, n, ...] each, in tensors that are reused.

    Observations are [T + 1, n, ...]; the last row belongs to no step.
    """

    @classmethod
    def of(cls, rollout: Rollout) -> "Batch":
        targets = (torch.zeros_like(rollout.rewards) for _ in range(3))
        return cls(rollout.obs, rollout.actions, rollout.logprobs, *targets)

    def minibatch(self, inds: torch.Tensor) -> Minibatch:
        """Rows ``inds`` [B] of the flattened steps and environments."""
        return Minibatch(*(column.flatten(0, 1)[inds] for column in self))


def fill_targets(batch: Batch, rollout: Rollout, args: Args) -> None:
    """Advantages, returns and the mask of a shard, from the values that the actors computed."""
    terminations, dones = rollout.terminations.float(), rollout.dones.float()
    advantages = compute_gae(rollout.rewards, rollout.values, terminations, dones, args.gamma, args.gae_lambda)
    batch.advantages.copy_(advantages)
    batch.returns.copy_(advantages + rollout.values[:-1])
    batch.mask.copy_(1.0 - rollout.resets.float())


def scale_rewards(
    moments: RunningMoments,
    rollouts: Sequence[Rollout],
    discounted: Sequence[torch.Tensor],
    sum_over_shards: Callable,
    gamma: float,
) -> None:
    """Divides rewards by the standard deviation of all discounted returns so far, and clips them to [-10, 10].

    Gymnasium's NormalizeReward does so at each step, and its sums go on after a truncation. Here it is once per
    rollout, over the environments of all shards.

    Args:
        moments: of the discounted returns; updated in place.
        rollouts: of this learner's shards; their rewards are scaled in place.
        discounted: for each of them, the discounted returns [n] of its last step; 0 at first, updated in place.
        sum_over_shards: the tensors of the shards here -> the sum over all shards, other learners' included.
    """
    sums = []
    for rollout, last in zip(rollouts, discounted, strict=True):
        rewards, mask = rollout.rewards.double(), 1.0 - rollout.resets.double()
        decays = gamma * mask  # a step that only resets starts a new sum
        rewards[0] += decays[0] * last
        returns = linear_recurrence(rewards, decays)
        last.copy_(returns[-1])
        sums.append(moments.sums(returns.unsqueeze(2), mask))
    moments.add(sum_over_shards(sums))
    for rollout in rollouts:
        rollout.rewards.div_(torch.sqrt(moments.var + 1e-8)).clamp_(-10.0, 10.0)


def make_update(
    agent: nn.Module, optimizer: Adam, batches: Sequence[Batch], args: Args
) -> tuple[list[Callable], Callable]:
    """The functions of an update that are compiled. The learners sum their gradients between ``gradient`` and ``step``.

    Args:
        batches: of this learner's shards.

    Returns:
        ``gradient(mb_inds)`` for each batch: what these rows add to the minibatch's gradient and losses, [P + 6];
        ``step(summed)``: takes an optimiser step with the sum of these; returns the Losses, stacked [6].
    """
    device_type = optimizer.params[0].device.type
    sizes = [p.numel() for p in optimizer.params]

    def make_gradient(batch: Batch) -> Callable:
        # A minibatch's losses are the mean over all shards and microbatches.
        num_terms = args.num_envs // batch.actions.shape[1] * args.gradient_accumulation_steps

        def gradient(mb_inds: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
                loss, losses = ppo_loss(agent, batch.minibatch(mb_inds), args)
            loss.backward()
            # One vector, which is one message to the other learners.
            message = torch.cat([*(p.grad.reshape(-1) for p in optimizer.params), torch.stack(losses)]) / num_terms
            optimizer.zero_grad()
            return message

        return gradient

    def step(summed: torch.Tensor) -> torch.Tensor:
        grads, losses = summed.split([sum(sizes), len(Losses._fields)])
        # Copies: clipping views in place would compile to a loop over the whole vector for each of them.
        for p, grad in zip(optimizer.params, torch.split_with_sizes_copy(grads, sizes), strict=True):
            p.grad = grad.view(p.shape)
        # On a CPU, TorchInductor 2.13 generates slow code for the foreach norm.
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=device_type == "cuda")
        optimizer.step()
        optimizer.zero_grad()
        return losses.clone()

    return [make_gradient(batch) for batch in batches], step


def train_epoch(
    b_inds: Sequence[torch.Tensor], gradients: Sequence[Callable], step: Callable, sum_over_shards: Callable, args: Args
) -> torch.Tensor:
    """An optimiser step for each minibatch, with rows of every shard; returns the mean of their losses [6].

    Args:
        b_inds: for each shard here, its rows in random order.
        gradients: one for each shard here.
        sum_over_shards: the tensors of the shards here -> the sum over all shards, other learners' included.
    """
    shape = args.num_minibatches, args.gradient_accumulation_steps, -1
    losses = []
    for mb_inds in zip(*(inds.view(shape) for inds in b_inds), strict=True):
        messages = [sum_in_order(map(gradient, inds)) for gradient, inds in zip(gradients, mb_inds, strict=True)]
        losses.append(step(sum_over_shards(messages)))
    return torch.stack(losses).mean(0)


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_act(agent: Callable, args: Args) -> Callable:
    """The function ``act(obs, noise)``: [n, ...], ``action_noise`` [n, k] -> [3, n], or [action_dim + 2, n].

    It returns actions, their log-probabilities and values as one float32 tensor, which holds discrete actions exactly.
    """

    @torch.no_grad()
    def act(obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
            policy, values = agent(obs)
        if isinstance(policy, Gaussian):
            actions = policy.mean + policy.logstd.exp() * noise
            return torch.stack([*actions.unbind(1), distribution(policy).log_prob(actions), values])
        # A sample of the softmax: https://en.wikipedia.org/wiki/Gumbel_distribution#Gumbel_reparameterization_tricks
        actions = (policy + noise).argmax(1)
        logprobs = policy.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
        return torch.stack([actions.float(), logprobs, values])

    return act


def play(thread: ActorThread, act: Callable, args: Args) -> None:
    """The acting loop, on its own thread: plays all rollouts of the run."""
    obs, _ = thread.envs.reset()
    resets = np.zeros(len(obs), bool)  # where the next step only resets its environment
    for rollout in thread.rollouts():  # with the parameters that are due; delivered after the loop's body
        noise = action_noise(args.seed, thread.env_indices, rollout.steps, thread.action_space, thread.device)
        for step in range(args.num_steps):
            device_obs = rollout.observe(step, obs)
            for block in thread.blocks:  # all environments at once, or shard by shard
                rollout.choices[step, :, block] = act(device_obs[block], noise[step, block])
            obs, rewards, terminations, truncations, infos = thread.envs.step(rollout.actions(step))
            rollout.record(step, rewards, terminations, truncations, resets, infos)
            resets = terminations | truncations
        device_obs = rollout.observe(args.num_steps, obs)
        for block in thread.blocks:  # for the values that the last step leads to
            rollout.choices[args.num_steps, :, block] = act(device_obs[block], noise[-1, block])


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """A saved model's policy: observations [N, ...] -> most likely actions [N], or mean ones [N, action_dim]."""
    space = envs.single_action_space
    agent = make_agent(envs.single_observation_space, space, Args(**model["network"]))
    agent.load_state_dict(model["agent"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        output, _ = agent(torch.from_numpy(obs))
        if isinstance(output, Gaussian):
            return np.clip(output.mean.numpy(), space.low, space.high)
        return output.argmax(1).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(
    acts: Sequence[Callable], gradients: Sequence[Callable], step: Callable, start: Start
) -> tuple[list[Callable], list[Callable], Callable]:
    """The functions, compiled and captured as the flags say."""
    args = start.args
    executable = partial(make_executable, device=start.device, compile=args.compile, cudagraphs=args.cudagraphs)
    acts = [executable(act, urgent=True) for act in acts]
    return acts, [executable(gradient) for gradient in gradients], executable(step)


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    start = resolve_start(args)
    validate_shards(args, start.layout)
    agent = make_agent(start.space, start.action_space, args)
    if start.member is None:
        supervise(start, __file__)  # starts this script in a process for each device
        return
    device = start.device
    num_rows = start.layout.shard_size * args.num_steps
    agent.to(device, memory_format=torch.channels_last)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    network = {name: getattr(args, name) for name in NETWORK_FLAGS}

    with join(start, __file__, agent, optimizer, network) as worker:
        # For the actor threads and shards of this process; it may have none.
        acts = [make_act(thread.agent, args) for thread in worker.threads]
        rollouts = list(worker.shards.values())
        batches = [Batch.of(rollout) for rollout in rollouts]
        gradients, step = make_update(agent, optimizer, batches, args)
        acts, gradients, step = make_executables(acts, gradients, step, start)

        with worker.warmup():
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                with one_thread():  # as actor threads have
                    for thread, act in zip(worker.threads, acts, strict=True):
                        act(*thread.example)
                for batch, rollout, gradient in zip(batches, rollouts, gradients, strict=True):
                    fill_targets(batch, rollout, args)
                    mb_inds = torch.arange(num_rows // args.num_minibatches, device=device)
                    step(gradient(mb_inds.chunk(args.gradient_accumulation_steps)[0]))
        for thread, act in zip(worker.threads, acts, strict=True):
            thread.start(play, act, args)

        is_continuous = isinstance(agent, ContinuousAgent)
        discounted = [torch.zeros_like(rollout.rewards[0], dtype=torch.float64) for rollout in rollouts]
        for number in worker.rollouts_due():  # none if this process has no learner
            if args.anneal_lr:
                frac = 1.0 - (number - 1.0) / start.num_updates
                optimizer.param_groups[0]["lr"].fill_(frac * args.learning_rate)
            if is_continuous:
                scale_rewards(agent.return_moments, rollouts, discounted, worker.sum_over_shards, args.gamma)
            for batch, rollout in zip(batches, rollouts, strict=True):
                fill_targets(batch, rollout, args)
            losses = torch.zeros(len(Losses._fields), device=device)
            for epoch in range((number - 1) * args.update_epochs, number * args.update_epochs):
                orders = [shard_generator(args.seed, shard, epoch).permutation(num_rows) for shard in worker.shards]
                b_inds = [torch.from_numpy(order).to(device) for order in orders]
                losses += train_epoch(b_inds, gradients, step, worker.sum_over_shards, args) / args.update_epochs
            if is_continuous:  # only now, so that at policy lag 0 actors and learners normalise a rollout alike
                sums = [agent.obs_moments.sums(batch.obs[:-1].flatten(2), batch.mask) for batch in batches]
                agent.obs_moments.add(worker.sum_over_shards(sums))
            worker.publish(Losses(*losses), optimizer_steps=args.update_epochs * args.num_minibatches)


if __name__ == "__main__":
    run_script(main, Args, __file__)
