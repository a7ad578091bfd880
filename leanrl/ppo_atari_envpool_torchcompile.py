"""Proximal Policy Optimization (PPO) on Atari games over EnvPool, made fast with torch.compile and CUDA graphs.

The same program as ppo_atari_envpool.py: read that first, then diff the two to see what was made fast.
``--compile``, ``--cudagraphs`` and ``--one-graph`` (which implies the second) can be switched on independently.

    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile
    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Pong-v5 --compile --amp bf16
    python leanrl/ppo_atari_envpool_torchcompile.py --compile --cudagraphs --num-env-groups 2   # on a CUDA device
    python leanrl/ppo_atari_envpool_torchcompile.py --compile --one-graph                       # likewise

What differs (``python -m leanrl.tools.ablate --rows atari`` measures most of the speed-ups):
- an environment step costs one call: act, with random numbers drawn before the rollout, and write to the rollout; with
  ``--num-env-groups 2`` half of the environments step while the actions of the other half are computed;
- torch.compile traces ``loss.backward()`` and the step of our own Adam, so an update is one graph, gather included;
- with ``--one-graph`` a step is one CUDA graph, copies included, and an epoch another (executables.py, Captured).

Measured speed and learning curves: doc/benchmarks/ppo_atari_envpool.md
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical

from leanrl.support.atari import CLEANRL, make_atari_envs, whole_games
from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import (
    available_cores,
    keep_freed_memory,
    resolve_device,
    set_cpu_numerics,
    synchronize_stream,
)
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, Captured, make_executable, untouched
from leanrl.support.layers import ChannelsLastLinear, interleaved
from leanrl.support.normalization import RunningMoments
from leanrl.support.onegraph import pinned_like
from leanrl.support.optim import Adam
from leanrl.support.run import Run, seed_everything
from leanrl.support.scan import linear_recurrence

PROTOCOL = CLEANRL


@dataclass
class Args(RunArgs):
    env_id: str = "Breakout-v5"
    """Atari game, as EnvPool names it"""
    total_timesteps: int = 10_000_000
    """environment steps of the whole run, of 4 frames each, rounded down to whole rollouts"""
    seed: int = 1
    """seed of the environments, the network and the exploration"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the network under autocast, except for its two heads"""
    num_threads: int | None = None
    """CPU threads of the update; by default all cores. Acting uses 1."""
    compile: bool = False
    """compile the policy step and the update with torch.compile"""
    cudagraphs: bool = False
    """replay the policy step and the update as CUDA graphs (tensordict's CudaGraphModule)"""
    one_graph: bool = False
    """replay everything between two environment steps as one hand-captured CUDA graph, and an epoch as another
    (implies --cudagraphs)"""
    num_env_groups: int = 1
    """groups of environments that are stepped in turn: one steps while another's actions are computed"""

    channels: int = 32
    """channels of the first convolution; the layers after it have 2, 2 and 16 times as many"""
    norm_obs: bool = False
    """normalise each pixel by its running mean and standard deviation, instead of dividing it by 255"""
    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_envs: int = 8
    """environments stepped together"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.1
    """clip range of the probability ratio"""
    clip_vloss: bool = True
    """clip the value loss too"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """stop the epochs of an update once the approximate KL divergence exceeds this"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_at_least(args, 1, "total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    require_at_least(args, 1, "num_threads", "num_env_groups", "checkpoint_every", "channels")
    require_at_least(args, 0, "seed", "clip_coef", "ent_coef", "vf_coef", "target_kl")
    require_positive(args, "learning_rate", "max_grad_norm", "max_seconds", "snapshot_seconds")
    require_unit_interval(args, "gamma", "gae_lambda")
    if args.num_envs % args.num_env_groups:
        raise bad("num_env_groups", args.num_env_groups, f"must divide num_envs = {args.num_envs}")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        raise bad("num_minibatches", args.num_minibatches, f"must divide num_envs * num_steps = {batch_size}")
    if args.norm_adv and batch_size // args.num_minibatches < 2:
        raise bad("num_minibatches", args.num_minibatches, "leaves minibatches of 1, which --norm-adv cannot normalise")
    if args.total_timesteps < batch_size:
        raise bad("total_timesteps", args.total_timesteps, f"is less than one rollout, {batch_size} steps")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The network of https://doi.org/10.1038/nature14236, shared by the policy and value heads."""

    def __init__(self, num_actions: int, channels: int = 32, norm_obs: bool = False) -> None:
        super().__init__()
        # Per pixel, in the memory order of channels_last images.
        self.obs_moments = RunningMoments((84 * 84 * 4,)) if norm_obs else None
        if norm_obs:  # kept in float32, so that no minibatch takes float64 square roots
            self.register_buffer("obs_mean", torch.zeros(84, 84, 4))
            self.register_buffer("obs_rstd", torch.ones(84, 84, 4))
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, channels, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(channels, 2 * channels, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(2 * channels, 2 * channels, 3, stride=1)),
            nn.ReLU(),
            layer_init(ChannelsLastLinear(2 * channels * 7 * 7, 16 * channels)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(16 * channels, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(16 * channels, 1), std=1.0)

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """uint8 [B, 4, 84, 84] -> distribution of the actions [B], value [B]"""
        hidden = self.network(obs / 255.0 if self.obs_moments is None else self.normalized(obs))
        # bf16 keeps 8 significant bits: too few for a value.
        with torch.autocast(obs.device.type, enabled=False):
            hidden = hidden.float()
            return Categorical(logits=self.actor(hidden), validate_args=False), self.critic(hidden).squeeze(-1)

    def observe(self, obs: torch.Tensor) -> None:
        """Adds frames uint8 [B, 4, 84, 84] to the moments."""
        self.obs_moments.update(obs.movedim(1, -1).flatten(1))
        self.obs_mean.copy_(self.obs_moments.mean.view_as(self.obs_mean))
        self.obs_rstd.copy_((self.obs_moments.var + 1e-8).rsqrt().view_as(self.obs_rstd))

    def normalized(self, obs: torch.Tensor) -> torch.Tensor:
        """Each pixel's deviation from its mean, in standard deviations (https://arxiv.org/abs/1810.12894, section 2.4).

        Moving objects stand out from the background, however small.
        """
        return ((obs.movedim(1, -1) - self.obs_mean) * self.obs_rstd).clamp(-5.0, 5.0).movedim(-1, 1)


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


class Minibatch(NamedTuple):
    """Steps to learn from, each [B, ...]."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor  # 0 where a step only reset its environment, else 1


class Rollout(Minibatch):
    """T steps of N environments and the observation after them, in preallocated tensors, each [T + 1, N, ...].

    Only observations and values have a meaningful last row.
    """

    @classmethod
    def allocate(cls, obs: torch.Tensor, args: Args) -> "Rollout":
        """For observations like ``obs`` [N, C, ...], on their device."""
        shape = args.num_steps + 1, args.num_envs
        channels, *size = obs.shape[1:]
        return cls(
            # Channels last, as the convolutions expect: an update has nothing to rearrange.
            torch.zeros(*shape, *size, channels, dtype=obs.dtype, device=obs.device).movedim(-1, 2),
            torch.zeros(shape, dtype=torch.int64, device=obs.device),
            *(torch.zeros(shape, device=obs.device) for _ in range(5)),
        )

    def minibatch(self, inds: torch.Tensor) -> Minibatch:
        """Rows ``inds`` [B] of the flattened steps and environments."""
        return Minibatch(*(column.flatten(0, 1)[inds] for column in self))


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438, equation 16).

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
    # advantages[t] = deltas[t] + decays[t] * advantages[t + 1]
    return linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0)


def finish_rollout(
    rollout: Rollout,
    rewards: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    resets: torch.Tensor,
    args: Args,
) -> None:
    """Fills in the rollout's advantages, returns and mask.

    Args:
        rewards, terminations, dones, resets: [T, N]; flags as floats. ``resets`` marks steps that only reset.
    """
    advantages = compute_gae(rewards, rollout.values, terminations, dones, args.gamma, args.gae_lambda)
    rollout.advantages[:-1] = advantages
    rollout.returns[:-1] = advantages + rollout.values[:-1]
    rollout.mask[:-1] = 1.0 - resets


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` [B] over the rows where ``mask`` [B] is 1."""
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


class Losses(NamedTuple):
    """What an update logs, each a 0-d tensor."""

    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    old_approx_kl: torch.Tensor
    approx_kl: torch.Tensor
    clipfrac: torch.Tensor


def ppo_loss(agent: Agent, minibatch: Minibatch, args: Args) -> tuple[torch.Tensor, Losses]:
    """PPO's clipped loss over one minibatch, and what is logged (detached)."""
    obs, actions, logprobs, advantages, returns, values, mask = minibatch
    probs, newvalue = agent(obs)
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

    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_clipped = values + torch.clamp(newvalue - values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    v_loss = 0.5 * masked_mean(v_loss, mask)

    entropy = masked_mean(probs.entropy(), mask)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    losses = pg_loss, v_loss, entropy, old_approx_kl, approx_kl, clipfrac
    return loss, Losses(*(x.detach() for x in losses))


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(agent: Agent, optimizer: Adam, rollout: Rollout, args: Args) -> Callable:
    """``update(mb_inds)``: takes one gradient step and returns the Losses, stacked [6]."""
    device_type = rollout.obs.device.type

    def update(mb_inds: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            loss, losses = ppo_loss(agent, rollout.minibatch(mb_inds), args)
        loss.backward()
        # On a CPU, TorchInductor 2.13 generates slow code for the foreach norm.
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=device_type == "cuda")
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses)

    return update


def train_epoch(update: Callable, b_inds: torch.Tensor, args: Args) -> torch.Tensor:
    """One ``update`` for each minibatch of the rows ``b_inds``; returns the last one's losses [6]."""
    for mb_inds in b_inds.split(len(b_inds) // args.num_minibatches):
        losses = update(mb_inds)
    return losses


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_policy_step(agent: Agent, rollout: Rollout, noise: torch.Tensor, args: Args) -> tuple[Callable, Callable]:
    """The functions that act.

    Args:
        noise: Gumbel, [(T + 1) * G, n, num_actions] for G groups of n environments; row t * G + g: step t of group g.

    Returns:
        ``policy_step(obs)``: [n, ...] -> actions [n] of one group; writes the step to the rollout's next row;
        ``start()``: draws the noise, rewinds to row 0 and, with bf16, casts the weights; call it before each rollout.
    """
    device_type = rollout.obs.device.type
    row = torch.zeros(1, dtype=torch.int64, device=noise.device)  # where the next step goes
    # In memory order: with any other view, TorchInductor would copy all steps to write one.
    columns = rollout.obs.movedim(2, -1), rollout.actions, rollout.logprobs, rollout.values
    rows = [column.flatten(0, 1).unflatten(0, noise.shape[:2]) for column in columns]

    acting = agent
    if args.amp == "bf16":
        # Its weights are cast to bfloat16 once per rollout; autocast would do so at every step.
        acting = deepcopy(agent)
        acting.network.bfloat16()

    @torch.no_grad()
    def start() -> None:
        if acting is not agent:
            torch._foreach_copy_([*acting.parameters(), *acting.buffers()], [*agent.parameters(), *agent.buffers()])
        noise.exponential_().log_().neg_()
        row.zero_()

    @torch.no_grad()
    def policy_step(obs: torch.Tensor) -> torch.Tensor:
        if args.compile and device_type == "cpu":
            obs = interleaved(obs)
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            probs, values = acting(obs)
        # A sample of the softmax: https://en.wikipedia.org/wiki/Gumbel_distribution#Gumbel_reparameterization_tricks
        actions = (probs.logits + noise.index_select(0, row).squeeze(0)).argmax(1)
        steps = obs.movedim(1, -1), actions, probs.log_prob(actions), values
        for column, step in zip(rows, steps, strict=True):
            column.index_copy_(0, row, step.unsqueeze(0))
        row.add_(1)
        return actions

    return policy_step, start


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """A saved model's policy: observations uint8 [N, 4, 84, 84] -> most likely actions [N]."""
    channels, norm_obs = len(model["agent"]["network.0.bias"]), "obs_moments.mean" in model["agent"]
    agent = Agent(int(envs.single_action_space.n), channels, norm_obs)
    agent.load_state_dict(model["agent"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        probs, _ = agent(torch.from_numpy(obs))
        return probs.logits.argmax(1).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(policy_step: Callable, update: Callable, obs: torch.Tensor, args: Args) -> tuple[Callable, ...]:
    """``policy_step`` and ``update``, compiled and captured as the flags say, with the copies to and from the device.

    Args:
        obs: [n, ...], an input of ``policy_step``; its memory is reused.

    Returns:
        ``act(obs)``: a pool's observations [n, ...] -> actions [n], both NumPy arrays;
        ``train(b_inds)``: an epoch over the rows ``b_inds``; returns the last minibatch's losses.
    """
    device = obs.device
    cudagraphs = args.cudagraphs and not args.one_graph
    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=cudagraphs)
    policy_step, update = executable(policy_step), executable(update)

    def act(obs: np.ndarray) -> np.ndarray:
        return policy_step(torch.from_numpy(obs).to(device)).cpu().numpy()

    def train(b_inds: torch.Tensor) -> torch.Tensor:
        return train_epoch(update, b_inds, args)

    if not args.one_graph:
        return act, train

    # One graph acts, from frames in pinned memory to actions in pinned memory. Another trains for one epoch, so that
    # --target-kl can stop between epochs.
    obs_cpu, actions_cpu = pinned_like(obs), pinned_like(obs.new_zeros(len(obs), dtype=torch.int64))
    inds = torch.zeros(args.num_envs * args.num_steps, dtype=torch.int64, device=device)

    def copy_and_act() -> None:
        actions_cpu.copy_(policy_step(obs.copy_(obs_cpu, non_blocking=True)), non_blocking=True)

    acting, epoch = (Captured(fn, torch.cuda.Stream(device)) for fn in (copy_and_act, partial(train, inds)))

    def captured_act(obs: np.ndarray) -> np.ndarray:
        obs_cpu.numpy()[:] = obs
        acting()
        synchronize_stream(device)
        return actions_cpu.numpy().copy()

    def captured_train(b_inds: torch.Tensor) -> torch.Tensor:
        inds.copy_(b_inds)
        return epoch()

    return captured_act, captured_train


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    num_threads = args.num_threads or available_cores()
    set_cpu_numerics(num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    group_size = args.num_envs // args.num_env_groups
    groups = [slice(first, first + group_size) for first in range(0, args.num_envs, group_size)]
    start = resumed_step(args.resume)
    pools = [
        make_atari_envs(args.env_id, group_size, args.seed, PROTOCOL, start=start, first_index=group.start)
        for group in groups
    ]
    if args.capture_video:
        require_video(args.env_id, "envpool")
    num_actions = int(pools[0].single_action_space.n)

    seed_everything(args.seed)
    agent = Agent(num_actions, args.channels, args.norm_obs).to(device, memory_format=torch.channels_last)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    next_obs = [pool.reset()[0] for pool in pools]
    obs = torch.from_numpy(next_obs[0]).to(device)
    rollout = Rollout.allocate(obs, args)
    noise = torch.zeros((args.num_steps + 1) * len(groups), group_size, num_actions, device=device)
    policy_step, start_rollout = make_policy_step(agent, rollout, noise, args)
    update = make_update(agent, optimizer, rollout, args)
    act, train = make_executables(policy_step, update, obs, args)
    games = EpisodeStatistics(args.num_envs)

    def state_dict() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    with Run(args, __file__, device, total_steps=num_iterations * batch_size) as run:
        run.model = lambda: {"agent": agent.state_dict()}
        if run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])

        with run.warmup(), untouched(state_dict(), device):
            # TorchInductor compiles the number of threads into CPU kernels, so each function is compiled with its own.
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                start_rollout()
                torch.set_num_threads(1)
                act(next_obs[0])
                torch.set_num_threads(num_threads)
                train(torch.arange(batch_size, device=device))

        # What the environments return, on the CPU until the end of the rollout.
        shape = args.num_steps, args.num_envs
        rewards, scores = np.zeros(shape, np.float32), np.zeros(shape)
        terminations, dones, game_ends = np.zeros((3, *shape), bool)
        last_dones = np.zeros(args.num_envs, bool)
        run.restore_rng()
        run.start_clock()
        for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.param_groups[0]["lr"].fill_(frac * args.learning_rate)

            if args.norm_obs:
                agent.observe(torch.from_numpy(np.concatenate(next_obs)).to(device))
            # A second PyTorch thread would spin while it waits for work, on a core that the environments need.
            torch.set_num_threads(1)
            start_rollout()
            for pool, obs in zip(pools, next_obs, strict=True):
                pool.send(act(obs))
            for step in range(args.num_steps):
                for i, (pool, group) in enumerate(zip(pools, groups, strict=True)):
                    next_obs[i], reward, terminated, truncated, infos = pool.recv()
                    done = terminated | truncated
                    rewards[step, group], terminations[step, group], dones[step, group] = reward, terminated, done
                    scores[step, group], game_ends[step, group] = whole_games(reward, done, infos)
                    actions = act(next_obs[i])
                    # The rollout's last observation gets its value now; the policy acts on it after the update.
                    if step < args.num_steps - 1:
                        pool.send(actions)
            torch.set_num_threads(num_threads)
            run.global_step += batch_size

            # Where a step only resets its environment (NEXT_STEP autoreset).
            resets = np.concatenate([last_dones[None], dones[:-1]])
            last_dones = dones[-1].copy()
            # A lost life ends the training episode, but whole games are reported.
            run.record_episodes(*games.add(scores, game_ends, resets))
            outcome = (torch.from_numpy(x).to(device, torch.float32) for x in (rewards, terminations, dones, resets))
            finish_rollout(rollout, *outcome, args)

            for _ in range(args.update_epochs):
                losses = train(torch.randperm(batch_size, device=device))
                run.optimizer_steps += args.num_minibatches
                if args.target_kl is not None and Losses(*losses).approx_kl > args.target_kl:
                    break

            live = rollout.mask[:-1] > 0
            y_true, y_pred = rollout.returns[:-1][live], rollout.values[:-1][live]
            explained_variance = 1 - (y_true - y_pred).var() / y_true.var()
            losses = {f"losses/{name}": value for name, value in Losses(*losses.tolist())._asdict().items()}
            losses["losses/explained_variance"] = explained_variance.item()
            run.log({"charts/learning_rate": float(optimizer.param_groups[0]["lr"]), **losses})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict())
    for pool in pools:
        pool.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
