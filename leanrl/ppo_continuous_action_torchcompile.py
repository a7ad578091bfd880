"""Proximal Policy Optimization (PPO) with continuous actions, made fast with torch.compile and CUDA graphs.

The same program as ppo_continuous_action.py: read that first, then diff the two to see what was made fast.
``--compile`` and ``--cudagraphs`` can be switched on independently.

    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile
    python leanrl/ppo_continuous_action_torchcompile.py --num-envs 64 --env-backend envpool --compile
    python leanrl/ppo_continuous_action_torchcompile.py --compile --cudagraphs      # on a CUDA device

What differs (measured speed-ups: doc/optimizations.md):
- a minibatch costs one call: gather, loss, backward, clipping and Adam are one graph;
- an environment step costs one call: normalise, write to the rollout, act with noise drawn beforehand. What acting does
  not need (values, log-probabilities, normalised rewards) is computed at the end of the rollout, in one batch.

Measured speed and learning curves: doc/benchmarks/ppo_continuous_action.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.normal import Normal

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import resolve_device, set_cpu_numerics, update_threads
from leanrl.support.envs import EnvBackend, make_envs, require_continuous_actions
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.layers import Float32Linear, mlp_as_sums
from leanrl.support.normalization import RewardNormalizer, RunningMoments
from leanrl.support.optim import Adam
from leanrl.support.run import Run, seed_everything
from leanrl.support.scan import linear_recurrence


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"
    """environment with continuous actions; Dict observations are flattened in the order of their keys"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, rounded down to whole rollouts"""
    seed: int = 1
    """seed of the environments, the network and the exploration noise"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the networks under autocast, except their last layers and, in the fast variant, acting"""
    num_threads: int | None = None
    """CPU threads of the update; by default 1 for minibatches under 1,024 rows and all cores above. Acting uses 1."""
    compile: bool = False
    """compile the policy step and the update with torch.compile"""
    cudagraphs: bool = False
    """replay the policy step and the update as CUDA graphs (tensordict's CudaGraphModule)"""
    env_backend: EnvBackend = "gymnasium"
    """gymnasium steps the environments in this process, envpool on C++ threads (faster with many environments)"""

    learning_rate: float = 3e-4
    """learning rate of Adam"""
    num_envs: int = 1
    """environments stepped together"""
    num_steps: int = 2048
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """clip range of the probability ratio"""
    clip_vloss: bool = True
    """clip the value loss too"""
    ent_coef: float = 0.0
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
    require_at_least(args, 1, "num_threads", "checkpoint_every")
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


def layer_init(layer: nn.Linear, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """Separate tanh networks for policy and value; the policy's standard deviation does not depend on the state."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(Float32Linear(64, 1), std=1.0),
        )
        self.actor_mean = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(Float32Linear(64, action_dim), std=0.01),
        )
        self.actor_logstd = nn.Parameter(torch.zeros(1, action_dim))

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """[..., obs_dim] -> [...]"""
        return self.critic(obs).squeeze(-1)

    def get_policy(self, obs: torch.Tensor) -> Normal:
        """[..., obs_dim] -> the distribution of each component of the actions [..., action_dim]"""
        action_mean = self.actor_mean(obs)
        return Normal(action_mean, self.actor_logstd.exp().expand_as(action_mean), validate_args=False)


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


class Minibatch(NamedTuple):
    """Steps to learn from, each [B, ...]."""

    obs: torch.Tensor  # normalised
    actions: torch.Tensor  # as sampled, not clipped
    logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor  # 0 where a step only reset its environment, else 1


class Rollout(Minibatch):
    """T steps of N environments and the observation after them, in preallocated tensors, each [T + 1, N, ...].

    Only observations and values have a meaningful last row; the mask's stays 0.
    """

    @classmethod
    def allocate(cls, num_steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device) -> "Rollout":
        shapes = (obs_dim,), (action_dim,), (), (), (), (), ()
        return cls(*(torch.zeros((num_steps + 1, num_envs, *shape), device=device) for shape in shapes))

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
    probs, newvalue = agent.get_policy(obs), agent.get_value(obs)
    logratio = probs.log_prob(actions).sum(1) - logprobs
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

    entropy = masked_mean(probs.entropy().sum(1), mask)
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


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_acting(
    agent: Agent,
    obs_moments: RunningMoments,
    rollout: Rollout,
    noise: torch.Tensor,
    row: torch.Tensor,
    low: np.ndarray,
    high: np.ndarray,
    as_sums: bool,
) -> tuple[Callable, Callable, Callable]:
    """The functions that are called at every environment step.

    Args:
        noise: [T + 1, N, action_dim], standard normal, drawn before each rollout.
        row: [1], the row of the rollout that is written next; acting increments it.
        low, high: [action_dim], bounds of the actions.
        as_sums: act with mlp_as_sums.

    Returns:
        ``observe(raw_obs)``: adds observations [N, obs_dim] to the moments and writes them, normalised, to the
            rollout's row;
        ``act()``: an action [N, action_dim] for that row, clipped to the bounds;
        ``policy_step(raw_obs)``: both.
    """
    low, high = (torch.as_tensor(bound, device=rollout.obs.device) for bound in (low, high))

    def observe(raw_obs: torch.Tensor) -> None:
        obs_moments.update(raw_obs)
        rollout.obs.index_copy_(0, row, obs_moments(raw_obs).unsqueeze(0))

    @torch.no_grad()
    def act() -> torch.Tensor:
        obs = rollout.obs.index_select(0, row).squeeze(0)
        mean = mlp_as_sums(agent.actor_mean, obs) if as_sums else agent.actor_mean(obs)
        action = mean + agent.actor_logstd.exp() * noise.index_select(0, row).squeeze(0)
        # The clipped action goes to the environment, the sampled one into the loss.
        rollout.actions.index_copy_(0, row, action.unsqueeze(0))
        row.add_(1)
        return torch.clamp(action, low, high)

    def policy_step(raw_obs: torch.Tensor) -> torch.Tensor:
        observe(raw_obs)
        return act()

    return observe, act, policy_step


@torch.no_grad()
def finish_rollout(
    agent: Agent,
    rollout: Rollout,
    normalize_rewards: RewardNormalizer,
    rewards: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    resets: torch.Tensor,
    args: Args,
) -> None:
    """Fills in what acting does not need, for all steps in one batch.

    Args:
        rewards, terminations, dones, resets: [T, N]; raw rewards, and flags as floats.
    """
    rollout.mask[:-1] = 1.0 - resets
    # As in the update, whose first ratios are therefore 1.
    with torch.autocast(rewards.device.type, torch.bfloat16, enabled=args.amp == "bf16"):
        rollout.logprobs.copy_(agent.get_policy(rollout.obs).log_prob(rollout.actions).sum(-1))
        rollout.values.copy_(agent.get_value(rollout.obs))
    rewards = normalize_rewards(rewards, terminations, rollout.mask[:-1])
    advantages = compute_gae(rewards, rollout.values, terminations, dones, args.gamma, args.gae_lambda)
    rollout.advantages[:-1] = advantages
    rollout.returns[:-1] = advantages + rollout.values[:-1]


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The deterministic policy of a saved model: raw observations [N, obs_dim] -> actions [N, action_dim]."""
    low, high = envs.single_action_space.low, envs.single_action_space.high
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
    agent.load_state_dict(model["agent"])
    mean, var = model["obs_rms"]["mean"].numpy(), model["obs_rms"]["var"].numpy()

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        normalized = np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)
        return np.clip(agent.actor_mean(torch.as_tensor(normalized, dtype=torch.float32)).numpy(), low, high)

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(policy_step: Callable, update: Callable, args: Args, device: torch.device):
    """``policy_step`` and ``update``, compiled and captured as the flags say."""
    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs)
    return executable(policy_step), executable(update)


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    num_threads = update_threads(args.num_threads, minibatch_size)
    set_cpu_numerics(num_threads, large_matmuls=False)
    if args.capture_video:
        require_video(args.env_id, args.env_backend)
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend, start=resumed_step(args.resume))
    require_continuous_actions(envs, args.env_id)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    seed_everything(args.seed)
    agent = Agent(obs_dim, action_dim).to(device)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    rollout = Rollout.allocate(args.num_steps, args.num_envs, obs_dim, action_dim, device)
    noise = torch.zeros_like(rollout.actions)
    obs_moments = RunningMoments((obs_dim,)).to(device)
    normalize_rewards = RewardNormalizer(args.num_envs, args.gamma, device)
    bounds = envs.single_action_space.low, envs.single_action_space.high
    as_sums = args.compile and device.type == "cpu" and args.num_envs == 1
    row = torch.zeros(1, dtype=torch.int64, device=device)
    observe, act, policy_step = make_acting(agent, obs_moments, rollout, noise, row, *bounds, as_sums)
    update = make_update(agent, optimizer, rollout, args)
    policy_step, update = make_executables(policy_step, update, args, device)

    def state_dict() -> dict:
        return {
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "obs_rms": obs_moments.state_dict(),
            "return_rms": normalize_rewards.moments.state_dict(),
        }

    with Run(args, __file__, device, total_steps=num_iterations * batch_size) as run:
        run.model = lambda: {"agent": agent.state_dict(), "obs_rms": obs_moments.state_dict()}
        if run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])
            obs_moments.load_state_dict(run.resumed["obs_rms"])
            normalize_rewards.moments.load_state_dict(run.resumed["return_rms"])

        # float64 whatever the environments return; in pinned memory if the device is a GPU, so that the copy does not
        # wait for it.
        obs_cpu = torch.from_numpy(envs.reset()[0].astype(np.float64))
        if device.type == "cuda":
            obs_cpu = obs_cpu.pin_memory()
        raw_obs = obs_cpu.to(device)
        with run.warmup(), untouched(state_dict(), device):
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                row.zero_()
                torch.set_num_threads(1)
                policy_step(raw_obs)
                torch.set_num_threads(num_threads)
                update(torch.arange(minibatch_size, device=device))

        # What the environments return, on the CPU until the end of the rollout.
        shape = args.num_steps, args.num_envs
        rewards, last_dones = np.zeros(shape), np.zeros(args.num_envs, bool)
        terminations, dones = np.zeros((2, *shape), bool)
        episodes = EpisodeStatistics(args.num_envs)
        row.fill_(args.num_steps)
        observe(raw_obs)
        run.restore_rng()
        run.start_clock()
        for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.param_groups[0]["lr"].fill_(frac * args.learning_rate)

            # A second PyTorch thread would spin while it waits for work, on a core that the environments need.
            torch.set_num_threads(1)
            rollout.obs[0] = rollout.obs[-1]
            noise.normal_()
            row.zero_()
            action = act()
            for step in range(args.num_steps):
                obs, rewards[step], terminations[step], truncated, _ = envs.step(action.cpu().numpy())
                dones[step] = terminations[step] | truncated
                obs_cpu.numpy()[:] = obs
                raw_obs = obs_cpu.to(device, non_blocking=True)
                # The policy acts on the rollout's last observation after the update.
                if step < args.num_steps - 1:
                    action = policy_step(raw_obs)
            observe(raw_obs)
            torch.set_num_threads(num_threads)
            run.global_step += batch_size

            resets = np.concatenate([last_dones[None], dones[:-1]])
            last_dones = dones[-1].copy()
            run.record_episodes(*episodes.add(rewards, dones, resets))
            outcome = (torch.from_numpy(x).to(device, torch.float32) for x in (rewards, terminations, dones, resets))
            finish_rollout(agent, rollout, normalize_rewards, *outcome, args)

            for _ in range(args.update_epochs):
                b_inds = torch.randperm(batch_size, device=device)
                for mb_inds in b_inds.split(minibatch_size):
                    losses = update(mb_inds)
                    run.optimizer_steps += 1
                if args.target_kl is not None and Losses(*losses).approx_kl > args.target_kl:
                    break

            live = rollout.mask > 0
            y_true, y_pred = rollout.returns[live], rollout.values[live]
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
