"""Soft Actor-Critic (SAC) for continuous actions: the readable eager reference.

Paper: https://arxiv.org/abs/1812.05905. Algorithm, names, hyperparameters and structure follow CleanRL's
https://docs.cleanrl.dev/rl-algorithms/sac/#sac_continuous_actionpy; what differs: steps that only reset an
environment are not stored.
sac_continuous_action_torchcompile.py is the same program, made fast.

    python leanrl/sac_continuous_action.py --env-id HalfCheetah-v5
    python leanrl/sac_continuous_action.py --env-id Hopper-v5 --seed 2 --save-model --capture-video

Measured speed and learning curves: doc/benchmarks/sac_continuous_action.md
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions.normal import Normal

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, resolve_device, set_cpu_numerics
from leanrl.support.envs import make_envs, require_continuous_actions, start_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import require_at_least, require_positive
from leanrl.support.evaluation import require_video
from leanrl.support.layers import Float32Linear, Float32TwinLinear, TwinLinear
from leanrl.support.off_policy import OffPolicyState, named_losses, require_off_policy
from leanrl.support.replay import Batch, Replay
from leanrl.support.run import Run, seed_everything


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"
    """Gymnasium environment with continuous actions; Dict observations are flattened in the order of their keys"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, rounded down to a multiple of --num-envs"""
    seed: int = 1
    """seed of the environments, the networks, the sampling and the noise"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the networks of the update under autocast, except their first and last layers"""
    num_threads: int | None = None
    """CPU threads of PyTorch; by default all cores"""
    log_every: int = 1_000
    """environment steps between log points"""
    checkpoint_replay: bool = True
    """save the replay buffer in checkpoints; without it, a resumed run first collects --learning-starts steps anew"""

    policy_lr: float = 3e-4
    """learning rate of the actor's Adam"""
    q_lr: float = 1e-3
    """learning rate of the critics' Adam, and of the entropy coefficient's"""
    num_envs: int = 1
    """environments stepped together"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """weight of the trained networks in the Polyak average of the target networks"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 5_000
    """environment steps with random actions before the first update"""
    updates_per_step: float = 1.0
    """critic updates per environment step; one step of N environments counts as N, resets included"""
    policy_frequency: int = 2
    """critic updates between rounds of actor updates"""
    policy_updates: int | None = None
    """actor updates in each round; by default as many as --policy-frequency, which makes up for the delay"""
    target_network_frequency: int = 1
    """critic updates per update of the target networks"""
    autotune: bool = True
    """learn the entropy coefficient; the target entropy is minus the number of action dimensions"""
    alpha: float = 0.2
    """the entropy coefficient with --no-autotune"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_off_policy(args)
    require_at_least(args, 1, "policy_frequency", "policy_updates", "target_network_frequency")
    require_at_least(args, 0, "alpha")
    require_positive(args, "policy_lr", "q_lr")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


class Critics(nn.Module):
    """Two independent Q-networks, side by side."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.fc1 = Float32TwinLinear(obs_dim + action_dim, 256)
        self.fc2 = TwinLinear(256, 256)
        self.fc3 = Float32TwinLinear(256, 1)

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """[B, obs_dim], [B, action_dim] -> [2, B]"""
        x = torch.cat([obs, actions], 1).expand(2, -1, -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class Actor(nn.Module):
    """The policy: a normal distribution squashed by tanh into the bounds ``low`` and ``high`` [action_dim]."""

    def __init__(self, obs_dim: int, low: np.ndarray, high: np.ndarray) -> None:
        super().__init__()
        self.fc1 = Float32Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_heads = Float32Linear(256, 2 * len(low))
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))
        self.register_buffer("action_scale", (self.high - self.low) / 2)
        self.register_buffer("action_bias", (self.high + self.low) / 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, obs_dim] -> mean and log standard deviation before squashing, each [B, action_dim]"""
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        mean, log_std = self.fc_heads(x).chunk(2, 1)
        log_std = torch.tanh(log_std)
        # From https://github.com/denisyarats/pytorch_sac; a clamp would have no gradient outside its bounds.
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples: [B, obs_dim], standard normal [B, action_dim] -> action [B, action_dim], its log-probability [B]"""
        mean, log_std = self(obs)
        std = log_std.exp()
        x_t = mean + std * noise  # the reparameterisation trick
        y_t = torch.tanh(x_t)
        log_prob = Normal(mean, std, validate_args=False).log_prob(x_t)
        # The density of the squashed action: the paper's equation 26.
        log_prob = log_prob - torch.log(self.action_scale * (1 - y_t**2) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1)


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def sac_target(
    actor: Actor, critics_target: Critics, alpha: torch.Tensor, batch: Batch, noise: torch.Tensor, args: Args
) -> torch.Tensor:
    """The critics' target: the soft value (the paper's equations 3 and 5), from the lower of two critics.

    Args:
        alpha: entropy coefficient, [1].
        noise: standard normal, [B, action_dim].

    Returns:
        [B]
    """
    next_actions, next_log_pi = actor.get_action(batch.next_obs, noise)
    min_qf_next_target = critics_target(batch.next_obs, next_actions).amin(0) - alpha * next_log_pi
    return batch.rewards + args.gamma * (1.0 - batch.terminations) * min_qf_next_target


def critic_loss(q_values: torch.Tensor, next_q_value: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each critic: [2, B], [B] -> [2]"""
    return ((q_values - next_q_value) ** 2).mean(1)


def actor_loss(
    actor: Actor, critics: Critics, alpha: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The paper's equation 7, averaged over ``obs`` [B, obs_dim]."""
    actions, log_pi = actor.get_action(obs, noise)
    return (alpha * log_pi - critics(obs, actions).amin(0)).mean()


def alpha_loss(log_alpha: torch.Tensor, log_pi: torch.Tensor, target_entropy: float) -> torch.Tensor:
    """The paper's equation 18, for log-probabilities [B] of the policy's own actions."""
    return (-log_alpha.exp() * (log_pi + target_entropy)).mean()


class Losses(NamedTuple):
    """What an update logs, in tensors that it overwrites."""

    qf_values: torch.Tensor  # [2], one per critic
    qf_loss: torch.Tensor  # [2]
    actor_loss: torch.Tensor  # [1]
    alpha: torch.Tensor  # [1]
    alpha_loss: torch.Tensor  # [1]


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(
    actor: Actor,
    critics: Critics,
    critics_target: Critics,
    log_alpha: torch.Tensor,
    actor_optimizer: torch.optim.Adam,
    q_optimizer: torch.optim.Adam,
    a_optimizer: torch.optim.Adam,
    replay: Replay,
    args: Args,
) -> tuple[Callable, Losses]:
    """The function that trains on one batch, and the losses that it writes.

    ``update(with_actor, with_targets)``: the flags say whether this update also trains the actor (and the entropy
    coefficient ``log_alpha.exp()``), and whether it updates the target networks.
    """
    device = replay.rows.device
    target_entropy = -float(len(actor.low))
    policy_updates = args.policy_updates or args.policy_frequency
    losses = Losses(*(torch.zeros(size, device=device) for size in (2, 2, 1, 1, 1)))
    losses.alpha.copy_(log_alpha.detach().exp())
    params, target_params = list(critics.parameters()), list(critics_target.parameters())

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    def update(with_actor: bool, with_targets: bool) -> None:
        batch = replay.sample(args.batch_size)
        # Drawn all at once: PyTorch before 2.13 may reorder the draws of a compiled update (pytorch/pytorch#181136).
        actor_steps = policy_updates if with_actor else 0
        draws = batch.actions.new_empty(1 + 2 * actor_steps, *batch.actions.shape).normal_()
        target_noise, actor_noise, alpha_noise = draws.split([1, actor_steps, actor_steps])
        with autocast():
            with torch.no_grad():
                next_q_value = sac_target(actor, critics_target, log_alpha.exp(), batch, target_noise[0], args)
            q_values = critics(batch.obs, batch.actions)
            qf_loss = critic_loss(q_values, next_q_value)
        qf_loss.sum().backward()
        q_optimizer.step()
        q_optimizer.zero_grad()
        losses.qf_values.copy_(q_values.detach().mean(1))
        losses.qf_loss.copy_(qf_loss.detach())

        for i in range(actor_steps):
            with autocast():
                pi_loss = actor_loss(actor, critics, log_alpha.detach().exp(), batch.obs, actor_noise[i])
            pi_loss.backward(inputs=list(actor.parameters()))
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            losses.actor_loss.copy_(pi_loss.detach())

            if args.autotune:
                with torch.no_grad(), autocast():
                    _, log_pi = actor.get_action(batch.obs, alpha_noise[i])
                a_loss = alpha_loss(log_alpha, log_pi, target_entropy)
                a_loss.backward()
                a_optimizer.step()
                a_optimizer.zero_grad()
                losses.alpha_loss.copy_(a_loss.detach())
            losses.alpha.copy_(log_alpha.detach().exp())

        if with_targets:
            with torch.no_grad():
                torch._foreach_lerp_(target_params, params, args.tau)

    return update, losses


# ------------------------------------------------------------------------------------------------------------ ACTING


@torch.no_grad()
def act(actor: Actor, obs: torch.Tensor) -> torch.Tensor:
    """Actions sampled from the policy: [N, obs_dim] -> [N, action_dim]"""
    noise = torch.randn(len(obs), len(actor.low), device=obs.device)
    return actor.get_action(obs, noise)[0]


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The deterministic policy of a saved model: observations [N, obs_dim] -> actions [N, action_dim]."""
    space = envs.single_action_space
    actor = Actor(envs.single_observation_space.shape[0], space.low, space.high)
    actor.load_state_dict(model["actor"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32))
        return (torch.tanh(mean) * actor.action_scale + actor.action_bias).numpy()

    return policy


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    set_cpu_numerics(args.num_threads or available_cores(), large_matmuls=args.amp == "none")
    if args.capture_video:
        require_video(args.env_id)
    envs = make_envs(args.env_id, args.num_envs, args.seed, start=resumed_step(args.resume))
    require_continuous_actions(envs, args.env_id)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    seed_everything(args.seed)
    actor = Actor(obs_dim, envs.single_action_space.low, envs.single_action_space.high).to(device)
    critics = Critics(obs_dim, action_dim).to(device)
    critics_target = deepcopy(critics)
    log_alpha = torch.tensor([1.0 if args.autotune else args.alpha], device=device).log().requires_grad_()
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    q_optimizer = torch.optim.Adam(critics.parameters(), lr=args.q_lr)
    a_optimizer = torch.optim.Adam([log_alpha], lr=args.q_lr)
    replay = Replay(args.buffer_size, obs_dim, action_dim, device)
    update, losses = make_update(
        actor, critics, critics_target, log_alpha, actor_optimizer, q_optimizer, a_optimizer, replay, args
    )
    episodes = EpisodeStatistics(args.num_envs)
    state = OffPolicyState(
        args,
        replay,
        envs,
        episodes,
        actor=actor,
        critics=critics,
        critics_target=critics_target,
        actor_optimizer=actor_optimizer,
        q_optimizer=q_optimizer,
        a_optimizer=a_optimizer,
        log_alpha=log_alpha,
        **losses._asdict(),
    )

    with Run(args, __file__, device, total_steps=args.total_timesteps // args.num_envs * args.num_envs) as run:
        run.model = lambda: {"actor": actor.state_dict()}
        schedule = state.resume(run)  # of updates: --learning-starts and --updates-per-step

        # resets: whether an environment's next step only resets it (NEXT_STEP autoreset).
        obs, resets = start_envs(envs, episodes, run.resumed and run.resumed["envs"])
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
        run.restore_rng()
        run.start_clock()
        while run.global_step < run.total_steps and not run.stop_requested:
            if run.global_step < args.learning_starts:
                actions = actor.low + (actor.high - actor.low) * torch.rand(args.num_envs, action_dim, device=device)
            else:
                actions = act(actor, obs)
            next_obs, rewards, terminations, truncations, _ = envs.step(actions.cpu().numpy())
            dones = terminations | truncations
            run.global_step += args.num_envs
            run.record_episodes(*episodes.add_step(rewards, dones, resets))

            next_obs = torch.as_tensor(next_obs, dtype=torch.float32, device=device)
            outcome = (torch.as_tensor(x, dtype=torch.float32, device=device) for x in (rewards, terminations, resets))
            replay.add(obs, next_obs, actions, *outcome)
            obs, resets = next_obs, dones

            due = schedule.due(run.global_step)
            for _ in range(due):
                run.optimizer_steps += 1
                update(
                    with_actor=run.optimizer_steps % args.policy_frequency == 0,
                    with_targets=run.optimizer_steps % args.target_network_frequency == 0,
                )
            if schedule.begins(run.global_step):  # the first update initialises the CUDA libraries
                run.start_clock()

            if run.log_due():
                run.log(named_losses(run, losses))
            if run.checkpoint_due():
                run.checkpoint(state.state_dict())

        run.finish(state.state_dict())
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
