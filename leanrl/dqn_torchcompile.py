"""Deep Q-Network (DQN), made fast with torch.compile and CUDA graphs.

The same program as dqn.py: read that first, then diff the two to see what was made fast. ``--compile`` and
``--cudagraphs`` can be switched on independently.

    python leanrl/dqn_torchcompile.py --env-id CartPole-v1 --compile
    python leanrl/dqn_torchcompile.py --compile --cudagraphs     # on a CUDA device

What differs (measured speed-ups: doc/optimizations.md):
- transitions wait on the CPU until an update is due or they fill a buffer; then one copy takes them to the device,
  and one call stores them, samples and trains. Between updates, an environment step costs only the greedy action, or
  nothing if the action is random;
- the greedy action for one observation is compiled into a few loops, without BLAS calls;
- torch.compile traces ``loss.backward()`` and the step of our own Adam, so an update is one graph.

Measured speed and learning curves: doc/benchmarks/dqn.md
"""

import math
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
from leanrl.support.envs import EnvBackend, make_envs, require_discrete_actions, start_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.layers import Float32Linear, mlp_as_sums
from leanrl.support.off_policy import OffPolicyState, named_losses, require_off_policy
from leanrl.support.optim import Adam
from leanrl.support.replay import Batch, Replay
from leanrl.support.run import Run, seed_everything


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """environment with discrete actions and a vector of numbers as observation"""
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

    compile: bool = False
    """compile the greedy action and the training step with torch.compile"""
    cudagraphs: bool = False
    """replay the greedy action and the training step as CUDA graphs (tensordict's CudaGraphModule)"""
    env_backend: EnvBackend = "gymnasium"
    """gymnasium steps the environments in this process, envpool on C++ threads (faster with many environments)"""

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
    q_network: QNetwork, target_network: QNetwork, optimizer: Adam, replay: Replay, args: Args
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


class Staging:
    """Transitions that wait on the CPU until one copy takes them all to the replay.

    Args:
        num_steps: how many environment steps it holds.
    """

    def __init__(self, num_steps: int, num_envs: int, obs_dim: int, device: torch.device) -> None:
        self.capacity = num_steps
        self.num_staged = 0
        self._device = device
        self._rows = torch.zeros(num_steps, num_envs, 2 * obs_dim + 4, pin_memory=device.type == "cuda")
        self._taken = torch.cuda.Event() if device.type == "cuda" else None
        numpy = self._rows.numpy()
        # Views of the columns of a row: obs, next_obs, action, reward, termination, reset.
        self._obs, self._next_obs = numpy[:, :, :obs_dim], numpy[:, :, obs_dim : 2 * obs_dim]
        self._actions, self._rewards, self._terminations, self._resets = numpy[:, :, 2 * obs_dim :].transpose(2, 0, 1)
        self._widths = [obs_dim, obs_dim, 1, 1, 1, 1]

    def add(self, obs, next_obs, actions, rewards, terminations, resets) -> None:
        """Takes one step of the environments, arrays [N, ...]."""
        i = self.num_staged
        if i == 0 and self._taken is not None:
            # The last copy may still be queued behind an update: steps with random actions do not wait for the device.
            self._taken.synchronize()
        self._obs[i], self._next_obs[i], self._actions[i] = obs, next_obs, actions
        self._rewards[i], self._terminations[i], self._resets[i] = rewards, terminations, resets
        self.num_staged += 1

    def take(self) -> torch.Tensor:
        """All rows [num_steps * N, 2 * obs_dim + 4] on the learner's device, unused ones marked as resets."""
        self._resets[self.num_staged :] = 1.0
        self.num_staged = 0
        rows = self._rows.flatten(0, 1).to(self._device, non_blocking=True)
        if self._taken is not None:
            self._taken.record(torch.cuda.current_stream(self._device))
        return rows

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``rows`` as the arguments of ``Replay.add``."""
        obs, next_obs, actions, rewards, terminations, resets = rows.split(self._widths, 1)
        return obs, next_obs, actions, rewards[:, 0], terminations[:, 0], resets[:, 0]


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The greedy policy of a saved model: observations [N, obs_dim] -> actions [N]."""
    q_network = QNetwork(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    q_network.load_state_dict(model["q_network"])

    def policy(obs: np.ndarray) -> np.ndarray:
        return greedy(q_network, torch.as_tensor(obs, dtype=torch.float32)).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(q_network: QNetwork, replay: Replay, staging: Staging, update: Callable, args: Args) -> tuple:
    """The functions of the loop, compiled and captured as the flags say.

    Returns:
        ``best_actions(obs)``: an array [N, obs_dim] -> the greedy actions [N];
        ``learn(rows)``: writes the staged rows to the replay and does one update;
        ``update()``: does one more.
    """
    device = replay.rows.device
    as_sums = args.compile and device.type == "cpu" and args.num_envs == 1
    network = partial(mlp_as_sums, q_network) if as_sums else q_network

    def learn(rows: torch.Tensor) -> None:
        replay.add(*staging.split(rows))
        update()

    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs)
    just_best_actions = executable(partial(greedy, network))

    def best_actions(obs: np.ndarray) -> torch.Tensor:
        return just_best_actions(torch.from_numpy(np.asarray(obs, np.float32)).to(device))

    return best_actions, executable(learn), executable(update)


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    set_cpu_numerics(args.num_threads, large_matmuls=False)
    if args.capture_video:
        require_video(args.env_id, args.env_backend)
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend, start=resumed_step(args.resume))
    require_discrete_actions(envs, args.env_id)
    obs_dim, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)

    seed_everything(args.seed)
    q_network = QNetwork(obs_dim, num_actions).to(device)
    target_network = deepcopy(q_network)
    optimizer = Adam(q_network.parameters(), lr=args.learning_rate)
    replay = Replay(args.buffer_size, obs_dim, 1, device)
    # As many steps as there are between two updates, but no more than the replay holds.
    capacity = min(math.ceil(1 / (args.num_envs * args.updates_per_step)), max(1, args.buffer_size // args.num_envs))
    staging = Staging(capacity, args.num_envs, obs_dim, device)
    just_update, losses = make_update(q_network, target_network, optimizer, replay, args)
    best_actions, learn, update = make_executables(q_network, replay, staging, just_update, args)
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

    def write_staged() -> None:
        if staging.num_staged:
            replay.add(*staging.split(staging.take()))

    def state_dict() -> dict:
        write_staged()
        return state.state_dict()

    with Run(args, __file__, device, total_steps=args.total_timesteps // args.num_envs * args.num_envs) as run:
        run.model = lambda: {"q_network": q_network.state_dict()}
        schedule = state.resume(run)  # of updates: --learning-starts and --updates-per-step

        with run.warmup(), untouched(state.tensors(), device):
            replay.size.clamp_(min=1)  # there must be a transition to sample
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                best_actions(np.zeros((args.num_envs, obs_dim)))
                learn(staging.take())
                if args.num_envs * args.updates_per_step > 1:
                    update()

        # resets: whether an environment's next step only resets it (NEXT_STEP autoreset).
        obs, resets = start_envs(envs, episodes, run.resumed and run.resumed["envs"])
        run.restore_rng()
        run.start_clock()
        while run.global_step < run.total_steps and not run.stop_requested:
            epsilon = linear_schedule(args, run.global_step)
            actions = act(best_actions, obs, num_actions, epsilon)
            next_obs, rewards, terminations, truncations, _ = envs.step(actions)
            dones = terminations | truncations
            run.global_step += args.num_envs
            run.record_episodes(*episodes.add_step(rewards, dones, resets))
            staging.add(obs, next_obs, actions, rewards, terminations, resets)
            obs, resets = next_obs, dones

            due = schedule.due(run.global_step)
            if due:
                if schedule.begins(run.global_step):
                    run.start_clock()
                run.optimizer_steps += due
                learn(staging.take())
                for _ in range(due - 1):
                    update()
            elif staging.num_staged == staging.capacity:
                write_staged()
            if run.global_step % args.target_network_frequency < args.num_envs:
                update_target(q_network, target_network, args.tau)

            if run.log_due():
                run.log({"charts/epsilon": epsilon, **named_losses(run, losses)})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict())
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
