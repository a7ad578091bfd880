"""Proximal Policy Optimization (PPO) on Atari games over EnvPool: the readable eager reference.

Paper: https://arxiv.org/abs/1707.06347. Algorithm, names, hyperparameters and structure follow CleanRL's
https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_atari_envpoolpy; what differs: truncated games are
bootstrapped from their final observation, and steps that only reset an environment are left out of the loss.
ppo_atari_envpool_torchcompile.py is the same program, made fast.

    python leanrl/ppo_atari_envpool.py --env-id Breakout-v5
    python leanrl/ppo_atari_envpool.py --env-id Pong-v5 --seed 2 --save-model --capture-video

Measured speed and learning curves: doc/benchmarks/ppo_atari_envpool.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical

from leanrl.support.atari import CLEANRL, make_atari_envs, whole_games
from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, keep_freed_memory, resolve_device, set_cpu_numerics
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.layers import ChannelsLastLinear
from leanrl.support.normalization import RunningMoments
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
    """CPU threads of PyTorch; by default all cores"""

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
    require_at_least(args, 1, "num_threads", "checkpoint_every", "channels")
    require_at_least(args, 0, "seed", "clip_coef", "ent_coef", "vf_coef", "target_kl")
    require_positive(args, "learning_rate", "max_grad_norm", "max_seconds", "snapshot_seconds")
    require_unit_interval(args, "gamma", "gae_lambda")
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


def make_update(agent: Agent, optimizer: torch.optim.Adam, rollout: Rollout, args: Args) -> Callable:
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


@torch.no_grad()
def policy_step(agent: Agent, rollout: Rollout, step: int, obs: torch.Tensor, args: Args) -> torch.Tensor:
    """Observations [N, ...] -> actions [N]; writes row ``step`` of the rollout."""
    rollout.obs[step] = obs
    with torch.autocast(obs.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
        probs, rollout.values[step] = agent(rollout.obs[step])
    actions = probs.sample()
    rollout.actions[step], rollout.logprobs[step] = actions, probs.log_prob(actions)
    return actions


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


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    set_cpu_numerics(args.num_threads or available_cores())
    if device.type == "cpu":
        keep_freed_memory()
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    envs = make_atari_envs(args.env_id, args.num_envs, args.seed, PROTOCOL, start=resumed_step(args.resume))
    if args.capture_video:
        require_video(args.env_id, "envpool")

    seed_everything(args.seed)
    agent = Agent(int(envs.single_action_space.n), args.channels, args.norm_obs)
    agent.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    next_obs = torch.from_numpy(envs.reset()[0]).to(device)
    rollout = Rollout.allocate(next_obs, args)
    update = make_update(agent, optimizer, rollout, args)
    games = EpisodeStatistics(args.num_envs)

    def state_dict() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    with Run(args, __file__, device, total_steps=num_iterations * batch_size) as run:
        run.model = lambda: {"agent": agent.state_dict()}
        if run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])

        # What the environments return, on the CPU until the end of the rollout.
        shape = args.num_steps, args.num_envs
        rewards, scores = np.zeros(shape, np.float32), np.zeros(shape)
        terminations, dones, game_ends = np.zeros((3, *shape), bool)
        last_dones = np.zeros(args.num_envs, bool)
        run.restore_rng()
        run.start_clock()
        first_iteration = run.global_step // batch_size + 1
        for iteration in range(first_iteration, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.param_groups[0]["lr"] = frac * args.learning_rate

            if args.norm_obs:
                agent.observe(next_obs)
            for step in range(args.num_steps):
                actions = policy_step(agent, rollout, step, next_obs, args)
                next_obs, reward, terminated, truncated, infos = envs.step(actions.cpu().numpy())
                next_obs = torch.from_numpy(next_obs).to(device)
                done = terminated | truncated
                rewards[step], terminations[step], dones[step] = reward, terminated, done
                scores[step], game_ends[step] = whole_games(reward, done, infos)
            policy_step(agent, rollout, args.num_steps, next_obs, args)  # for the value of the last observation
            run.global_step += batch_size

            # Where a step only resets its environment (NEXT_STEP autoreset).
            resets = np.concatenate([last_dones[None], dones[:-1]])
            last_dones = dones[-1].copy()
            # A lost life ends the training episode, but whole games are reported.
            run.record_episodes(*games.add(scores, game_ends, resets))
            outcome = (torch.from_numpy(x).to(device, torch.float32) for x in (rewards, terminations, dones, resets))
            finish_rollout(rollout, *outcome, args)

            for _ in range(args.update_epochs):
                losses = train_epoch(update, torch.randperm(batch_size, device=device), args)
                run.optimizer_steps += args.num_minibatches
                if args.target_kl is not None and Losses(*losses).approx_kl > args.target_kl:
                    break
            if iteration == first_iteration < num_iterations:  # the first update initialises the CUDA libraries
                run.start_clock()

            live = rollout.mask[:-1] > 0
            y_true, y_pred = rollout.returns[:-1][live], rollout.values[:-1][live]
            explained_variance = 1 - (y_true - y_pred).var() / y_true.var()
            losses = {f"losses/{name}": value for name, value in Losses(*losses.tolist())._asdict().items()}
            losses["losses/explained_variance"] = explained_variance.item()
            run.log({"charts/learning_rate": float(optimizer.param_groups[0]["lr"]), **losses})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict())
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
