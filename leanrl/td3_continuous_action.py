"""Twin Delayed Deep Deterministic policy gradient (TD3) for continuous actions: the readable eager reference.

Paper: https://arxiv.org/abs/1802.09477. Algorithm, names, hyperparameters and structure follow CleanRL's
https://docs.cleanrl.dev/rl-algorithms/td3/#td3_continuous_actionpy; what differs: steps that only
reset an environment are not stored, and target actions are clipped to the bounds dimension by dimension.
td3_continuous_action_torchcompile.py is the same program, made fast.

    python leanrl/td3_continuous_action.py --env-id HalfCheetah-v5
    python leanrl/td3_continuous_action.py --env-id Hopper-v5 --seed 2 --save-model --capture-video

Measured speed and learning curves: doc/benchmarks/td3_continuous_action.md
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

    learning_rate: float = 3e-4
    """learning rate of Adam, for the actor and the critics"""
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
    learning_starts: int = 25_000
    """environment steps with random actions before the first update"""
    updates_per_step: float = 1.0
    """critic updates per environment step; one step of N environments counts as N, resets included"""
    policy_frequency: int = 2
    """critic updates per update of the actor and the target networks"""
    policy_noise: float = 0.2
    """standard deviation of the noise that smooths the target policy, in units of the action scale"""
    noise_clip: float = 0.5
    """clip range of that noise, in units of the action scale"""
    exploration_noise: float = 0.1
    """standard deviation of the exploration noise, in units of the action scale"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_off_policy(args)
    require_at_least(args, 1, "policy_frequency")
    require_at_least(args, 0, "policy_noise", "exploration_noise", "noise_clip")
    require_positive(args, "learning_rate")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


class Critics(nn.Module):
    """Two independent Q-networks, side by side."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.fc1 = Float32TwinLinear(obs_dim + action_dim, 256)
        self.fc2 = TwinLinear(256, 256)
        self.fc3 = Float32TwinLinear(256, 1)

    def forward(self, obs: torch.Tensor, actions: torch.Tensor, count: int = 2) -> torch.Tensor:
        """[B, obs_dim], [B, action_dim] -> [count, B], the values of the first ``count`` networks"""
        x = torch.cat([obs, actions], 1).expand(count, -1, -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


class Actor(nn.Module):
    """The policy: an action within the bounds ``low`` and ``high`` [action_dim]."""

    def __init__(self, obs_dim: int, low: np.ndarray, high: np.ndarray) -> None:
        super().__init__()
        self.fc1 = Float32Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mu = Float32Linear(256, len(low))
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))
        self.register_buffer("action_scale", (self.high - self.low) / 2)
        self.register_buffer("action_bias", (self.high + self.low) / 2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """[B, obs_dim] -> [B, action_dim]"""
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        return torch.tanh(self.fc_mu(x)) * self.action_scale + self.action_bias


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def td3_target(
    actor_target: Actor, critics_target: Critics, batch: Batch, noise: torch.Tensor, args: Args
) -> torch.Tensor:
    """The critics' target: clipped double Q-learning, target policy smoothing (the paper's algorithm 1).

    Args:
        noise: standard normal, [B, action_dim].

    Returns:
        [B]
    """
    clipped_noise = (noise * args.policy_noise).clamp(-args.noise_clip, args.noise_clip) * actor_target.action_scale
    next_actions = (actor_target(batch.next_obs) + clipped_noise).clamp(actor_target.low, actor_target.high)
    min_qf_next_target = critics_target(batch.next_obs, next_actions).amin(0)
    return batch.rewards + args.gamma * (1.0 - batch.terminations) * min_qf_next_target


def critic_loss(q_values: torch.Tensor, next_q_value: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each critic: [2, B], [B] -> [2]"""
    return ((q_values - next_q_value) ** 2).mean(1)


class Losses(NamedTuple):
    """What an update logs, in tensors that it overwrites."""

    qf_values: torch.Tensor  # [2], one per critic
    qf_loss: torch.Tensor  # [2]
    actor_loss: torch.Tensor  # [1]


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(
    actor: Actor,
    critics: Critics,
    actor_target: Actor,
    critics_target: Critics,
    actor_optimizer: torch.optim.Adam,
    q_optimizer: torch.optim.Adam,
    replay: Replay,
    args: Args,
) -> tuple[Callable, Losses]:
    """The function ``update(with_actor)`` that trains on one batch, and the losses that it writes."""
    device = replay.rows.device
    losses = Losses(*(torch.zeros(size, device=device) for size in (2, 2, 1)))
    params = [*actor.parameters(), *critics.parameters()]
    target_params = [*actor_target.parameters(), *critics_target.parameters()]

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    def update(with_actor: bool) -> None:
        batch = replay.sample(args.batch_size)
        noise = torch.randn_like(batch.actions)
        with autocast():
            with torch.no_grad():
                next_q_value = td3_target(actor_target, critics_target, batch, noise, args)
            q_values = critics(batch.obs, batch.actions)
            qf_loss = critic_loss(q_values, next_q_value)
        qf_loss.sum().backward()
        q_optimizer.step()
        q_optimizer.zero_grad()
        losses.qf_values.copy_(q_values.detach().mean(1))
        losses.qf_loss.copy_(qf_loss.detach())

        if with_actor:
            with autocast():
                actor_loss = -critics(batch.obs, actor(batch.obs), count=1).mean()
            actor_loss.backward(inputs=list(actor.parameters()))
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            losses.actor_loss.copy_(actor_loss.detach())
            with torch.no_grad():
                torch._foreach_lerp_(target_params, params, args.tau)

    return update, losses


# ------------------------------------------------------------------------------------------------------------ ACTING


@torch.no_grad()
def act(actor: Actor, obs: torch.Tensor, args: Args) -> torch.Tensor:
    """The policy's actions with exploration noise, within the bounds: [N, obs_dim] -> [N, action_dim]"""
    actions = actor(obs)
    noise = torch.randn_like(actions) * args.exploration_noise * actor.action_scale
    return (actions + noise).clamp(actor.low, actor.high)


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The deterministic policy of a saved model: observations [N, obs_dim] -> actions [N, action_dim]."""
    space = envs.single_action_space
    actor = Actor(envs.single_observation_space.shape[0], space.low, space.high)
    actor.load_state_dict(model["actor"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        return actor(torch.as_tensor(obs, dtype=torch.float32)).numpy()

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
    actor_target, critics_target = deepcopy(actor), deepcopy(critics)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    q_optimizer = torch.optim.Adam(critics.parameters(), lr=args.learning_rate)
    replay = Replay(args.buffer_size, obs_dim, action_dim, device)
    update, losses = make_update(
        actor, critics, actor_target, critics_target, actor_optimizer, q_optimizer, replay, args
    )
    episodes = EpisodeStatistics(args.num_envs)
    state = OffPolicyState(
        args,
        replay,
        envs,
        episodes,
        actor=actor,
        critics=critics,
        actor_target=actor_target,
        critics_target=critics_target,
        actor_optimizer=actor_optimizer,
        q_optimizer=q_optimizer,
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
                actions = act(actor, obs, args)
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
                update(with_actor=run.optimizer_steps % args.policy_frequency == 0)
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
