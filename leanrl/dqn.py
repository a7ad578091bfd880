"""Deep Q-Network (DQN) for discrete actions: the readable eager reference.

Paper: https://www.nature.com/articles/nature14236. Algorithm, names, hyperparameters and structure follow CleanRL's
https://docs.cleanrl.dev/rl-algorithms/dqn/#dqnpy; what differs: steps that only reset an environment are
not stored, and each environment decides independently whether to explore.
dqn_torchcompile.py is the same program, made fast.

    python leanrl/dqn.py --env-id CartPole-v1
    python leanrl/dqn.py --env-id Acrobot-v1 --seed 2 --save-model --capture-video

Measured speed and learning curves: doc/benchmarks/dqn.md
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
import torch.nn.functional as F

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import resolve_device, set_cpu_numerics
from leanrl.support.envs import make_envs, require_discrete_actions, start_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.layers import Float32Linear
from leanrl.support.off_policy import OffPolicyState, named_losses, require_off_policy
from leanrl.support.replay import Batch, Replay
from leanrl.support.run import Run, seed_everything


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """Gymnasium environment with discrete actions and a vector of numbers as observation"""
    total_timesteps: int = 500_000
    """environment steps of the whole run, rounded down to a multiple of --num-envs"""
    seed: int = 1
    """seed of the environments, the network, the sampling and the exploration"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the networks of the update under autocast, except their first and last layers"""
    num_threads: int = 1
    """CPU threads of PyTorch; the network is too small to gain from a second one"""
    log_every: int = 1_000
    """environment steps between log points"""
    checkpoint_replay: bool = True
    """save the replay buffer in checkpoints; without it, a resumed run first collects --learning-starts steps anew"""

    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_envs: int = 1
    """environments stepped together"""
    buffer_size: int = 10_000
    """capacity of the replay buffer, in transitions"""
    gamma: float = 0.99
    """discount"""
    tau: float = 1.0
    """weight of the trained network in the Polyak average of the target network; 1 copies it"""
    target_network_frequency: int = 500
    """environment steps between updates of the target network"""
    batch_size: int = 128
    """transitions per update"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.05
    """probability of a random action after the exploration fraction"""
    exploration_fraction: float = 0.5
    """fraction of the run over which that probability falls from --start-e to --end-e"""
    learning_starts: int = 10_000
    """environment steps before the first update"""
    updates_per_step: float = 0.1
    """updates per environment step; one step of N environments counts as N, resets included"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_off_policy(args)
    require_at_least(args, 1, "target_network_frequency")
    require_positive(args, "learning_rate", "exploration_fraction")
    require_unit_interval(args, "start_e", "end_e")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


class QNetwork(nn.Sequential):
    """The value of each action in a state: [B, obs_dim] -> [B, num_actions]"""

    def __init__(self, obs_dim: int, num_actions: int) -> None:
        super().__init__(
            Float32Linear(obs_dim, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            Float32Linear(84, num_actions),
        )


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def dqn_target(target_network: QNetwork, batch: Batch, gamma: float) -> torch.Tensor:
    """The TD targets for the actions taken, [B] (the paper's algorithm 1)."""
    target_max = target_network(batch.next_obs).amax(1)
    return batch.rewards + gamma * (1.0 - batch.terminations) * target_max


def dqn_loss(
    q_values: torch.Tensor, actions: torch.Tensor, td_target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error, and the mean value of the actions taken: [B, num_actions], [B, 1], [B] -> scalars"""
    old_val = q_values.gather(1, actions.long()).squeeze(1)
    return F.mse_loss(td_target, old_val), old_val.mean()


class Losses(NamedTuple):
    """What an update logs, in tensors that it overwrites."""

    td_loss: torch.Tensor  # [1]
    q_values: torch.Tensor  # [1]


def linear_schedule(args: Args, global_step: int) -> float:
    """The probability of a random action at ``global_step``."""
    progress = min(1.0, global_step / (args.exploration_fraction * args.total_timesteps))
    return args.start_e + (args.end_e - args.start_e) * progress


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(
    q_network: QNetwork, target_network: QNetwork, optimizer: torch.optim.Adam, replay: Replay, args: Args
) -> tuple[Callable, Losses]:
    """The function ``update()`` that trains on one batch, and the losses that it writes."""
    device_type = replay.rows.device.type
    losses = Losses(*(torch.zeros(1, device=replay.rows.device) for _ in Losses._fields))

    def update() -> None:
        batch = replay.sample(args.batch_size)
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            with torch.no_grad():
                td_target = dqn_target(target_network, batch, args.gamma)
            loss, q_value = dqn_loss(q_network(batch.obs), batch.actions, td_target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.td_loss.copy_(loss.detach())
        losses.q_values.copy_(q_value.detach())

    return update, losses


@torch.no_grad()
def update_target(q_network: QNetwork, target_network: QNetwork, tau: float) -> None:
    """Moves the target's parameters by the fraction ``tau`` towards the trained ones."""
    torch._foreach_lerp_(list(target_network.parameters()), list(q_network.parameters()), tau)


# ------------------------------------------------------------------------------------------------------------ ACTING


@torch.no_grad()
def greedy(q_network: QNetwork, obs: torch.Tensor) -> torch.Tensor:
    """The greedy actions: [N, obs_dim] -> [N]"""
    return q_network(obs).argmax(1)


def act(best_actions: Callable, obs: torch.Tensor | np.ndarray, num_actions: int, epsilon: float) -> np.ndarray:
    """Epsilon-greedy actions [N] for ``obs`` [N, obs_dim]; calls ``best_actions`` only if one of them is greedy."""
    coins, choices = np.random.random((2, len(obs)))
    actions = (choices * num_actions).astype(np.int64)
    is_greedy = coins >= epsilon
    if is_greedy.any():
        actions[is_greedy] = best_actions(obs).cpu().numpy()[is_greedy]
    return actions


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The greedy policy of a saved model: observations [N, obs_dim] -> actions [N]."""
    q_network = QNetwork(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    q_network.load_state_dict(model["q_network"])

    def policy(obs: np.ndarray) -> np.ndarray:
        return greedy(q_network, torch.as_tensor(obs, dtype=torch.float32)).numpy()

    return policy


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    set_cpu_numerics(args.num_threads, large_matmuls=False)
    if args.capture_video:
        require_video(args.env_id)
    envs = make_envs(args.env_id, args.num_envs, args.seed, start=resumed_step(args.resume))
    require_discrete_actions(envs, args.env_id)
    obs_dim, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)

    seed_everything(args.seed)
    q_network = QNetwork(obs_dim, num_actions).to(device)
    target_network = deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    replay = Replay(args.buffer_size, obs_dim, 1, device)
    update, losses = make_update(q_network, target_network, optimizer, replay, args)
    episodes = EpisodeStatistics(args.num_envs)
    state = OffPolicyState(
        args,
        replay,
        envs,
        episodes,
        q_network=q_network,
        target_network=target_network,
        optimizer=optimizer,
        **losses._asdict(),
    )

    with Run(args, __file__, device, total_steps=args.total_timesteps // args.num_envs * args.num_envs) as run:
        run.model = lambda: {"q_network": q_network.state_dict()}
        schedule = state.resume(run)  # of updates: --learning-starts and --updates-per-step

        # resets: whether an environment's next step only resets it (NEXT_STEP autoreset).
        obs, resets = start_envs(envs, episodes, run.resumed and run.resumed["envs"])
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
        run.restore_rng()
        run.start_clock()
        while run.global_step < run.total_steps and not run.stop_requested:
            epsilon = linear_schedule(args, run.global_step)
            actions = act(partial(greedy, q_network), obs, num_actions, epsilon)
            next_obs, rewards, terminations, truncations, _ = envs.step(actions)
            dones = terminations | truncations
            run.global_step += args.num_envs
            run.record_episodes(*episodes.add_step(rewards, dones, resets))

            next_obs = torch.as_tensor(next_obs, dtype=torch.float32, device=device)
            outcome = (actions[:, None], rewards, terminations, resets)
            replay.add(obs, next_obs, *(torch.as_tensor(x, dtype=torch.float32, device=device) for x in outcome))
            obs, resets = next_obs, dones

            due = schedule.due(run.global_step)
            for _ in range(due):
                run.optimizer_steps += 1
                update()
            if schedule.begins(run.global_step):  # the first update initialises the CUDA libraries
                run.start_clock()
            if run.global_step % args.target_network_frequency < args.num_envs:
                update_target(q_network, target_network, args.tau)

            if run.log_due():
                run.log({"charts/epsilon": epsilon, **named_losses(run, losses)})
            if run.checkpoint_due():
                run.checkpoint(state.state_dict())

        run.finish(state.state_dict())
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
