"""IMPALA, distributed: actors on threads, learners that correct for the actors' lag with V-trace.

Papers: https://arxiv.org/abs/1802.01561 (IMPALA), https://arxiv.org/abs/2310.00036 (Cleanba, the source of
flags and hyperparameters). What differs: 48 environments a thread; rewards, dones and masks are aligned with the action
that caused them, truncated episodes are bootstrapped, and with --num-shards the gradient does not depend on the number
of learners. The runtime is leanrl/sebulba/. cleanba_ppo.py has other targets, loss and update, and continuous actions.

    python leanrl/cleanba_impala.py --env-id Breakout-v5                             # actor and learner on one device
    python leanrl/cleanba_impala.py --actor-device-ids 0 --learner-device-ids 1 2    # an actor and two learners
    python leanrl/cleanba_impala.py --env-id Catch-v0 --device cpu --total-timesteps 500000
    torchrun --nproc-per-node 2 leanrl/cleanba_impala.py --learner-device-ids 0 1 --compile

Layouts, launching and failures: doc/distributed.md
Learning: doc/benchmarks/cleanba.md
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
from torch.distributions.categorical import Categorical

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.args import SebulbaArgs
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.randomness import action_noise
from leanrl.sebulba.rollout import Rollout
from leanrl.sebulba.start import Start, resolve_start
from leanrl.sebulba.supervisor import supervise
from leanrl.sebulba.worker import join
from leanrl.support.cli import run_script
from leanrl.support.devices import one_thread
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.executables import WARMUP_CALLS, make_executable
from leanrl.support.layers import Float32Linear
from leanrl.support.optim import RMSprop
from leanrl.support.pooling import max_pool_same
from leanrl.support.scan import linear_recurrence


@dataclass
class Args(SebulbaArgs):
    env_id: str = "Breakout-v5"
    """environment of EnvPool or Gymnasium (see --env-backend) with discrete actions"""
    protocol: Literal["cleanba", "cleanrl"] = "cleanba"
    """Atari rules; cleanba: sticky actions, all 18 actions and whole games; cleanrl: a lost life ends an episode"""
    total_timesteps: int = 50_000_000
    """environment steps of the whole run, rounded down to whole rollouts"""
    seed: int = 1
    """seed of the environments, the network and the exploration"""
    torso: Literal["auto", "impala", "nature", "mlp"] = "auto"
    """network: IMPALA's residual network or DQN's for images, an MLP for other observations; auto: impala or mlp"""
    channels: tuple[int, ...] = (16, 32, 32)
    """channels of the stages of the impala torso"""
    hiddens: tuple[int, ...] = (256,)
    """widths of the linear layers of the impala torso (fixed for nature: 512, and for mlp: two layers of 64)"""

    policy_lag: int | Literal["newest"] = 1
    """rollout r is played with the parameters after r - 1 - POLICY_LAG updates; 0 is synchronous. newest: with the
    latest available, at most 2 behind; such runs are not reproducible"""

    learning_rate: float = 6e-4
    """learning rate of RMSProp"""
    num_steps: int = 20
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount"""
    num_minibatches: int = 4
    """optimiser steps per rollout, each on a part of the environments of every shard"""
    gradient_accumulation_steps: int = 1
    """microbatches per minibatch, computed one by one to save memory"""
    rho_bar: float = 1.0
    """rho-bar: truncates the importance weights of the temporal differences"""
    c_bar: float = 1.0
    """c-bar: truncates the importance weights of the traces"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 40.0
    """gradients are clipped to this norm"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument of the algorithm that cannot work."""
    require_at_least(args, 1, "total_timesteps", "num_steps", "num_minibatches", "gradient_accumulation_steps")
    require_at_least(args, 0, "seed", "ent_coef", "vf_coef")
    require_positive(args, "learning_rate", "max_grad_norm", "rho_bar", "c_bar")
    require_unit_interval(args, "gamma")
    if not args.channels or min(args.channels) < 1:
        raise bad("channels", args.channels, "needs at least one stage, of at least 1 channel")
    if not args.hiddens or min(args.hiddens) < 1:
        raise bad("hiddens", args.hiddens, "needs at least one layer, of at least 1 unit")


def validate_shards(args: Args, layout: Layout) -> None:
    """Raises UsageError unless a shard's environments divide into minibatches, and those into microbatches."""
    if layout.shard_size % (args.num_minibatches * args.gradient_accumulation_steps):
        needed = f"times --gradient-accumulation-steps {args.gradient_accumulation_steps} must divide"
        raise bad("num_minibatches", args.num_minibatches, f"{needed} the {layout.shard_size} environments of a shard")


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


# The flags that ``make_agent`` reads; they are saved in model.pt.
NETWORK_FLAGS = ("torso", "channels", "hiddens")


def make_agent(space: gym.spaces.Box, action_space: gym.Space, args: Args) -> nn.Module:
    """The network that ``--torso`` names, or that suits the observations. UsageError if they do not fit."""
    if not isinstance(action_space, gym.spaces.Discrete):
        raise bad("env_id", args.env_id, "has continuous actions; this script needs discrete ones, try cleanba_ppo.py")
    num_actions = int(action_space.n)
    is_image = space.dtype == np.uint8 and len(space.shape) == 3
    torso = args.torso if args.torso != "auto" else "impala" if is_image else "mlp"
    if torso == "mlp":
        return VectorAgent(int(np.prod(space.shape)), num_actions)
    if not is_image or (torso == "nature" and space.shape[1:] != (84, 84)):
        raise bad("torso", torso, f"is for images; observations are {space.dtype} of shape {space.shape}")
    if torso == "nature":
        return ImageAgent(NatureCNN(space.shape), 512, num_actions)
    return ImageAgent(ImpalaCNN(space.shape, args.channels, args.hiddens), args.hiddens[-1], num_actions)


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

    ``values[t + 1]`` is the value of the observation after step t, the final one if step t ended an episode. It is the
    bootstrap value unless the episode terminated; ``dones`` (terminated or truncated) ends the trace. Results for steps
    that only reset an environment are meaningless, and affect no other step.

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
    # After the last step of an episode, or of the rollout, the next state has no target: its value is used.
    next_vs = torch.cat([vs[1:], values[-1:]])
    next_vs = torch.where(dones > 0, values[1:], next_vs)
    return vs, clipped_rhos * (rewards + discounts * next_vs - values[:-1])


class Minibatch(NamedTuple):
    """Rollouts of some environments, [T, N, ...] each; flags are floats."""

    obs: torch.Tensor  # [T + 1, N, ...]
    actions: torch.Tensor
    logprobs: torch.Tensor  # of the policy that acted
    rewards: torch.Tensor
    terminations: torch.Tensor
    dones: torch.Tensor
    mask: torch.Tensor  # 0 where a step only reset its environment, else 1


class Losses(NamedTuple):
    """What an update logs, each a 0-d tensor."""

    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor


def impala_loss(agent: nn.Module, minibatch: Minibatch, args: Args) -> tuple[torch.Tensor, Losses]:
    """The paper's loss (section 4.2), summed over the steps, and what is logged (sums, detached)."""
    obs, actions, logprobs, rewards, terminations, dones, mask = minibatch
    logits, values = agent(obs.flatten(0, 1))
    logits, values = logits.view(*obs.shape[:2], -1), values.view(obs.shape[:2])
    probs = Categorical(logits=logits[:-1], validate_args=False)
    newlogprob = probs.log_prob(actions)
    log_rhos = (newlogprob - logprobs).detach()
    vs, advantages = vtrace(
        log_rhos, rewards, values.detach(), terminations, dones, args.gamma, args.rho_bar, args.c_bar
    )
    pg_loss = -(advantages * newlogprob * mask).sum()
    v_loss = 0.5 * ((vs - values[:-1]) ** 2 * mask).sum()
    entropy = (probs.entropy() * mask).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    return loss, Losses(pg_loss.detach(), v_loss.detach(), entropy.detach())


# ------------------------------------------------------------------------------------------------------------ UPDATE


def take_minibatch(rollout: Rollout, envs: torch.Tensor) -> Minibatch:
    """The environments ``envs`` [N] of a shard's rollout."""
    columns = rollout.obs, rollout.actions, rollout.logprobs, rollout.rewards
    flags = rollout.terminations.float(), rollout.dones.float(), 1.0 - rollout.resets.float()
    return Minibatch(*(column[:, envs] for column in (*columns, *flags)))


def make_update(
    agent: nn.Module, optimizer: RMSprop, rollouts: Sequence[Rollout], args: Args
) -> tuple[list[Callable], Callable]:
    """The functions of an update that are compiled. The learners sum their gradients between ``gradient`` and ``step``.

    Args:
        rollouts: of this learner's shards.

    Returns:
        ``gradient(mb_envs)`` for each rollout: what these environments add to the minibatch's gradient and losses,
        [P + 3];
        ``step(summed)``: takes an optimiser step with the sum of these; returns the Losses, stacked [3].
    """
    device_type = optimizer.params[0].device.type
    sizes = [p.numel() for p in optimizer.params]
    # The gradient is that of the summed losses, but the mean losses are logged.
    num_rows = args.num_steps * args.num_envs // args.num_minibatches

    def make_gradient(rollout: Rollout) -> Callable:
        def gradient(mb_envs: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
                loss, losses = impala_loss(agent, take_minibatch(rollout, mb_envs), args)
            loss.backward()
            # One vector, which is one message to the other learners.
            message = torch.cat([*(p.grad.reshape(-1) for p in optimizer.params), torch.stack(losses) / num_rows])
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

    return [make_gradient(rollout) for rollout in rollouts], step


def train(
    mb_envs: torch.Tensor, gradients: Sequence[Callable], step: Callable, sum_over_shards: Callable
) -> torch.Tensor:
    """An optimiser step for each minibatch, with environments of every shard; returns the mean of their losses [3].

    Args:
        mb_envs: [num_minibatches, gradient_accumulation_steps, n], environments of a shard.
        gradients: one for each shard here.
        sum_over_shards: the tensors of the shards here -> the sum over all shards, other learners' included.
    """
    losses = []
    for envs in mb_envs:
        losses.append(step(sum_over_shards([sum_in_order(map(gradient, envs)) for gradient in gradients])))
    return torch.stack(losses).mean(0)


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_act(agent: Callable, args: Args) -> Callable:
    """The function ``act(obs, noise)``: [n, ...], Gumbel noise [n, num_actions] -> [3, n].

    It returns actions, their log-probabilities and values as one float32 tensor, which holds discrete actions exactly.
    """

    @torch.no_grad()
    def act(obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
            logits, values = agent(obs)
        # A sample of the softmax: https://en.wikipedia.org/wiki/Gumbel_distribution#Gumbel_reparameterization_tricks
        actions = (logits + noise).argmax(1)
        logprobs = logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
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
        rollout.observe(args.num_steps, obs)


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """A saved model's policy: observations [N, ...] -> most likely actions [N]."""
    agent = make_agent(envs.single_observation_space, envs.single_action_space, Args(**model["network"]))
    agent.load_state_dict(model["agent"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        logits, _ = agent(torch.from_numpy(obs))
        return logits.argmax(1).numpy()

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
    agent.to(device, memory_format=torch.channels_last)
    optimizer = RMSprop(agent.parameters(), lr=args.learning_rate, alpha=0.99, eps=0.01)
    network = {name: getattr(args, name) for name in NETWORK_FLAGS}
    shape = args.num_minibatches, args.gradient_accumulation_steps, -1
    mb_envs = torch.arange(start.layout.shard_size, device=device).view(shape)

    with join(start, __file__, agent, optimizer, network) as worker:
        # For the actor threads and shards of this process; it may have none.
        acts = [make_act(thread.agent, args) for thread in worker.threads]
        gradients, step = make_update(agent, optimizer, list(worker.shards.values()), args)
        acts, gradients, step = make_executables(acts, gradients, step, start)

        with worker.warmup():
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                with one_thread():  # as actor threads have
                    for thread, act in zip(worker.threads, acts, strict=True):
                        act(*thread.example)
                for gradient in gradients:
                    step(gradient(mb_envs[0, 0]))
        for thread, act in zip(worker.threads, acts, strict=True):
            thread.start(play, act, args)

        for number in worker.rollouts_due():  # none if this process has no learner
            if args.anneal_lr:
                frac = 1.0 - (number - 1.0) / start.num_updates
                optimizer.param_groups[0]["lr"].fill_(frac * args.learning_rate)
            losses = train(mb_envs, gradients, step, worker.sum_over_shards)
            worker.publish(Losses(*losses), optimizer_steps=args.num_minibatches)


if __name__ == "__main__":
    run_script(main, Args, __file__)
