"""Proximal Policy Optimization (PPO) with continuous actions, made fast with torch.compile and CUDA graphs.

The same algorithm and numbers as ppo_continuous_action.py (read that first; a diff of the two is the documentation of
what was made fast). ``--compile`` and ``--cudagraphs`` switch each lever by itself.

    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile
    python leanrl/ppo_continuous_action_torchcompile.py --num-envs 64 --env-backend envpool --compile
    python leanrl/ppo_continuous_action_torchcompile.py --compile --cudagraphs      # on a CUDA device

What is different, each with its measured gain in doc/optimizations.md:
- a step of the environment costs one call: normalise, write to the rollout, act. Values and log-probabilities do not
  decide the action, so they wait for the end of the rollout and are computed there in one batch, as are the
  normalised rewards and GAE (by a scan);
- a minibatch costs one call: gather, loss, gradient by torch.func, clipping and Adam over one flat vector.

Measured speed and learning curves: doc/benchmarks/ppo_continuous_action.md
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import resolve_device, update_threads
from leanrl.support.envs import EnvBackend, make_envs, require_continuous_actions
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.inductor import mlp_as_sums
from leanrl.support.layers import Float32Linear
from leanrl.support.normalization import RewardNormalizer, RunningMoments
from leanrl.support.optim import FlatAdam, clip_grad_norm
from leanrl.support.run import Run, seed_everything
from leanrl.support.scan import linear_recurrence


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"
    """environment with continuous actions"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run"""
    seed: int = 1
    """seed of the environments, the network and the exploration noise"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the networks of the update under autocast"""
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
    """let the learning rate fall linearly to 0"""
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
    require_positive(args, "learning_rate", "max_grad_norm")
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
        """[B, obs_dim] -> [B]"""
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, obs_dim] -> action mean [B, action_dim], log of its standard deviation [1, action_dim], value [B]"""
        return self.actor_mean(obs), self.actor_logstd, self.get_value(obs)


def gaussian_logprob(noise: torch.Tensor, logstd: torch.Tensor) -> torch.Tensor:
    """Log-density of ``mean + exp(logstd) * noise`` under Normal(mean, exp(logstd)), summed over the last dimension.

    What torch.distributions.Normal computes, less its checks and objects.
    """
    return (-0.5 * noise**2 - logstd - 0.5 * math.log(2 * math.pi)).sum(-1)


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


@dataclass
class Rollout:
    """T steps of N environments, allocated once on the learner's device, so that graphs may hold their addresses."""

    obs: torch.Tensor  # [T + 1, N, obs_dim] normalised; the last is what the last step led to
    noise: torch.Tensor  # [T, N, action_dim] standard normal, drawn before the rollout
    actions: torch.Tensor  # [T, N, action_dim] as sampled, not clipped
    logprobs: torch.Tensor  # [T, N], like the four below
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor  # 0 where a step only reset its environment
    step: torch.Tensor  # [1] where the next action goes

    @classmethod
    def allocate(cls, num_steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device) -> "Rollout":
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            obs=zeros(num_steps + 1, num_envs, obs_dim),
            noise=zeros(num_steps, num_envs, action_dim),
            actions=zeros(num_steps, num_envs, action_dim),
            logprobs=zeros(num_steps, num_envs),
            advantages=zeros(num_steps, num_envs),
            returns=zeros(num_steps, num_envs),
            values=zeros(num_steps, num_envs),
            weights=zeros(num_steps, num_envs),
            step=zeros(1, dtype=torch.int64),
        )

    def minibatch(self, inds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows ``inds`` of obs, actions, logprobs, advantages, returns, values, weights; steps and envs flattened."""
        columns = (self.logprobs, self.advantages, self.returns, self.values, self.weights)
        rows = (self.obs[:-1].flatten(0, 1)[inds], self.actions.flatten(0, 1)[inds])
        return rows + tuple(column.flatten()[inds] for column in columns)


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

    Arguments and result as in ppo_continuous_action.py.
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminations) - values[:-1]
    decays = gamma * gae_lambda * (1.0 - dones)
    return linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0)


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
    """Fills the rollout's values, log-probabilities, advantages, returns and weights, all steps in one batch.

    Args:
        rewards, terminations, dones, resets: [T, N]; raw rewards, and flags as floats.
    """
    rollout.weights.copy_(1.0 - resets)
    rewards = normalize_rewards(rewards, terminations, rollout.weights)
    values = agent.get_value(rollout.obs)
    advantages = compute_gae(rewards, values, terminations, dones, args.gamma, args.gae_lambda)
    rollout.values.copy_(values[:-1])
    rollout.advantages.copy_(advantages)
    rollout.returns.copy_(advantages + values[:-1])
    rollout.logprobs.copy_(gaussian_logprob(rollout.noise, agent.actor_logstd))


def weighted_mean(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` over the rows that count (weight 1)."""
    return (x * weights).sum() / weights.sum().clamp(min=1.0)


def ppo_loss(
    action_mean: torch.Tensor,
    action_logstd: torch.Tensor,
    newvalue: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss over one minibatch.

    Args:
        action_mean, action_logstd, newvalue: what the agent says now.
        actions: [B, action_dim]; the others [B]. ``weights`` is 0 for steps that only reset an environment, else 1.

    Returns:
        the loss, and [6]: policy loss, value loss, entropy, old_approx_kl, approx_kl, clipfrac (detached).
    """
    newlogprob = gaussian_logprob((actions - action_mean) * torch.exp(-action_logstd), action_logstd)
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

    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_clipped = values + torch.clamp(newvalue - values, -args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    v_loss = 0.5 * weighted_mean(v_loss, weights)

    # The same for every row, since the deviation does not depend on the state.
    entropy = (0.5 + 0.5 * math.log(2 * math.pi) + action_logstd).sum()
    entropy_loss = weighted_mean(entropy, weights)
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
    parts = torch.stack([pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac])
    return loss, parts.detach()


LOSS_NAMES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(agent: Agent, optimizer: FlatAdam, rollout: Rollout, args: Args) -> Callable:
    """The function ``update(mb_inds) -> parts`` that takes one gradient step, as one graph."""
    device_type = optimizer.params.device.type

    def update(mb_inds: torch.Tensor) -> torch.Tensor:
        obs, *rest = rollout.minibatch(mb_inds)

        def loss_fn(params: dict[str, torch.Tensor]):
            with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
                outputs = torch.func.functional_call(agent, params, (obs,))
                return ppo_loss(*outputs, *rest, args)

        # torch.func instead of .backward(), which breaks the graph in three.
        grads, parts = torch.func.grad(loss_fn, has_aux=True)(optimizer.unflatten(optimizer.params))
        optimizer.step(clip_grad_norm(optimizer.flatten(grads), args.max_grad_norm))
        return parts

    return update


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_policy(
    agent: Agent, obs_moments: RunningMoments, rollout: Rollout, low: np.ndarray, high: np.ndarray, as_sums: bool
) -> tuple[Callable, Callable, Callable]:
    """The functions that take part in every step of the environment.

    Returns:
        ``observe(raw_obs)``: [N, obs_dim] is merged into the moments and written, normalised, to the rollout's step;
        ``act()``: an action [N, action_dim] for that step, clipped to the environment's bounds;
        ``policy_step(raw_obs)``: both.
    """
    low, high = (torch.as_tensor(bound, device=rollout.obs.device) for bound in (low, high))

    def observe(raw_obs: torch.Tensor) -> None:
        obs_moments.update(raw_obs)
        rollout.obs.index_copy_(0, rollout.step, obs_moments.normalize(raw_obs).unsqueeze(0))

    def act() -> torch.Tensor:
        obs = rollout.obs.index_select(0, rollout.step).squeeze(0)
        mean = mlp_as_sums(agent.actor_mean, obs) if as_sums else agent.actor_mean(obs)
        noise = rollout.noise.index_select(0, rollout.step).squeeze(0)
        action = mean + agent.actor_logstd.exp() * noise
        # The clipped action goes to the environment, the sampled one into the loss.
        rollout.actions.index_copy_(0, rollout.step, action.unsqueeze(0))
        rollout.step.add_(1)
        return torch.clamp(action, low, high)

    def policy_step(raw_obs: torch.Tensor) -> torch.Tensor:
        observe(raw_obs)
        return act()

    return observe, act, policy_step


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
    return executable(policy_step, cpp_wrapper=False), executable(update)


# -------------------------------------------------------------------------------------------------------------- MAIN


@torch.no_grad()
def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    num_threads = update_threads(args.num_threads, minibatch_size)
    # And no more of set_cpu_numerics: oneDNN is slower than MKL at products this small.
    torch.set_num_threads(num_threads)
    if args.capture_video:
        require_video(args.env_id, args.env_backend)
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend, start=resumed_step(args.resume))
    require_continuous_actions(envs, args.env_id)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    seed_everything(args.seed)
    agent = Agent(obs_dim, action_dim).to(device)
    optimizer = FlatAdam(agent, lr=args.learning_rate, eps=1e-5)
    rollout = Rollout.allocate(args.num_steps, args.num_envs, obs_dim, action_dim, device)
    obs_moments = RunningMoments.start((obs_dim,), device)
    normalize_rewards = RewardNormalizer(args.num_envs, args.gamma, device)
    bounds = envs.single_action_space.low, envs.single_action_space.high
    as_sums = args.compile and device.type == "cpu" and args.num_envs == 1
    observe, act, policy_step = make_policy(agent, obs_moments, rollout, *bounds, as_sums)
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
        if run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])
            obs_moments.load_state_dict(run.resumed["obs_rms"])
            normalize_rewards.moments.load_state_dict(run.resumed["return_rms"])

        # In float64 whatever the environments give, and in pinned memory on the way to a GPU, so that the copy does not
        # wait for the device.
        obs_cpu = torch.from_numpy(envs.reset()[0].astype(np.float64))
        if device.type == "cuda":
            obs_cpu = obs_cpu.pin_memory()
        raw_obs = obs_cpu.to(device)
        with run.warmup():
            touched = [*optimizer.tensors(), *obs_moments.tensors(), rollout.obs, rollout.actions, rollout.step]
            with untouched(touched, device):
                for _ in range(WARMUP_CALLS if args.compile or args.cudagraphs else 1):
                    rollout.step.zero_()
                    torch.set_num_threads(1)
                    policy_step(raw_obs)
                    torch.set_num_threads(num_threads)
                    update(torch.arange(minibatch_size, device=device))

        # What the environments say, on the CPU until the end of the rollout.
        rewards = np.zeros((args.num_steps, args.num_envs))
        terminations = np.zeros((args.num_steps, args.num_envs), bool)
        dones = np.zeros((args.num_steps, args.num_envs), bool)
        last_dones = np.zeros(args.num_envs, bool)
        episodes = EpisodeStatistics(args.num_envs)
        rollout.step.fill_(args.num_steps)
        observe(raw_obs)
        run.restore_rng()
        run.start_clock()
        for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.lr.fill_(frac * args.learning_rate)

            # A second thread of PyTorch's would wait for work by spinning, on a core that the environments need.
            torch.set_num_threads(1)
            rollout.obs[0] = rollout.obs[-1]
            rollout.noise.normal_()
            rollout.step.zero_()
            action = act()
            for step in range(args.num_steps):
                obs, rewards[step], terminations[step], truncated, _ = envs.step(action.cpu().numpy())
                dones[step] = terminations[step] | truncated
                obs_cpu.numpy()[:] = obs
                raw_obs = obs_cpu.to(device, non_blocking=True)
                # The last observation of the rollout is acted upon after the update.
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
                    parts = update(mb_inds)
                    run.optimizer_steps += 1
                if args.target_kl is not None and parts[LOSS_NAMES.index("approx_kl")] > args.target_kl:
                    break

            live = rollout.weights > 0
            y_true, y_pred = rollout.returns[live], rollout.values[live]
            explained_variance = 1 - (y_true - y_pred).var() / y_true.var()
            losses = {f"losses/{name}": value for name, value in zip(LOSS_NAMES, parts.tolist(), strict=True)}
            losses["losses/explained_variance"] = explained_variance.item()
            run.log({"charts/learning_rate": optimizer.lr.item(), **losses})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict(), model={"agent": agent.state_dict(), "obs_rms": obs_moments.state_dict()})
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
