"""Parallelised Q-Network (PQN), made fast with torch.compile and CUDA graphs.

The same program as pqn.py: read that first, then diff the two to see what was made fast. ``--compile`` and
``--cudagraphs`` can be switched on independently.

    python leanrl/pqn_torchcompile.py --env-id CartPole-v1 --compile
    python leanrl/pqn_torchcompile.py --num-envs 64 --num-steps 32 --env-backend envpool --compile
    python leanrl/pqn_torchcompile.py --compile --cudagraphs     # on a CUDA device

What differs:
- a minibatch costs one call: gather, loss, backward, clipping and our own Adam, which torch.compile can trace, are one
  graph;
- the greedy actions of a step cost one call, which for few environments is compiled into loops without BLAS calls.

Details and their sources: doc/algorithms/pqn.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import resolve_device, set_cpu_numerics, update_threads
from leanrl.support.envs import EnvBackend, make_envs, require_discrete_actions, save_envs, start_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.layers import Float32Linear, mlp_as_sums
from leanrl.support.optim import Adam
from leanrl.support.run import Run, seed_everything
from leanrl.support.scan import linear_recurrence


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """environment with discrete actions and a vector of numbers as observation"""
    total_timesteps: int = 500_000
    """environment steps of the whole run, rounded down to whole rollouts"""
    seed: int = 1
    """seed of the environments, the network and the exploration"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the network of the update under autocast, except its first and last layers"""
    num_threads: int | None = None
    """CPU threads of PyTorch; by default 1 for minibatches under 1,024 rows and all cores above"""
    compile: bool = False
    """compile the greedy actions and the update with torch.compile"""
    cudagraphs: bool = False
    """replay the greedy actions and the update as CUDA graphs (tensordict's CudaGraphModule)"""
    env_backend: EnvBackend = "gymnasium"
    """gymnasium steps the environments in this process, envpool on C++ threads (faster with many environments)"""

    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_envs: int = 4
    """environments stepped together"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount"""
    q_lambda: float = 0.65
    """lambda of the returns: 0 bootstraps from the next step, 1 from the end of the rollout"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over each rollout"""
    max_grad_norm: float = 10.0
    """gradients are clipped to this norm"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.05
    """probability of a random action after the exploration fraction"""
    exploration_fraction: float = 0.5
    """fraction of the run over which that probability falls from --start-e to --end-e"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_at_least(args, 1, "total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    require_at_least(args, 1, "num_threads", "checkpoint_every")
    require_at_least(args, 0, "seed")
    require_positive(args, "learning_rate", "max_grad_norm", "exploration_fraction", "max_seconds", "snapshot_seconds")
    require_unit_interval(args, "gamma", "q_lambda", "start_e", "end_e")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        raise bad("num_minibatches", args.num_minibatches, f"must divide num_envs * num_steps = {batch_size}")
    if args.total_timesteps < batch_size:
        raise bad("total_timesteps", args.total_timesteps, f"is less than one rollout, {batch_size} steps")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


def layer_init(layer: nn.Linear, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class QNetwork(nn.Sequential):
    """The value of each action in a state: [..., obs_dim] -> [..., num_actions]"""

    def __init__(self, obs_dim: int, num_actions: int) -> None:
        # The layer norms keep it stable without a target network.
        super().__init__(
            layer_init(Float32Linear(obs_dim, 120)),
            nn.LayerNorm(120),
            nn.ReLU(),
            layer_init(nn.Linear(120, 84)),
            nn.LayerNorm(84),
            nn.ReLU(),
            layer_init(Float32Linear(84, num_actions)),
        )


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


class Minibatch(NamedTuple):
    """Steps to learn from, each [B, ...]."""

    obs: torch.Tensor
    actions: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor  # 0 where a step only reset its environment, else 1


class Rollout(Minibatch):
    """T steps of N environments and the observation after them, in preallocated tensors, each [T + 1, N, ...].

    Only observations have a meaningful last row.
    """

    @classmethod
    def allocate(cls, num_steps: int, num_envs: int, obs_dim: int, device: torch.device) -> "Rollout":
        shape = num_steps + 1, num_envs
        return cls(
            torch.zeros(*shape, obs_dim, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            *(torch.zeros(shape, device=device) for _ in range(2)),
        )

    def minibatch(self, inds: torch.Tensor) -> Minibatch:
        """Rows ``inds`` [B] of the flattened steps and environments."""
        return Minibatch(*(column.flatten(0, 1)[inds] for column in self))


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def lambda_returns(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    q_lambda: float,
) -> torch.Tensor:
    """Peng's Q(lambda), the targets for the actions taken:

        returns[t] = rewards[t] + gamma * (q_lambda * returns[t + 1] + (1 - q_lambda) * values[t + 1])

    ``values[t + 1]`` is the best action's value in the observation after step t, the true last one if step t ended an
    episode. At the end of the rollout, and where ``dones`` (terminated or truncated) ends an episode, it replaces the
    whole bracket; after a termination it counts as 0. Returns of steps that only reset an environment are meaningless,
    and affect no other step.

    Args:
        rewards, terminations, dones: [T, N]; the flags as floats.
        values: [T + 1, N].

    Returns:
        returns [T, N]
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminations) - values[:-1]
    decays = gamma * q_lambda * (1.0 - dones)
    # With advantages = returns - values: advantages[t] = deltas[t] + decays[t] * advantages[t + 1], which is GAE.
    return linear_recurrence(deltas.flip(0), decays.flip(0)).flip(0) + values[:-1]


@torch.no_grad()
def finish_rollout(
    q_network: QNetwork,
    rollout: Rollout,
    rewards: torch.Tensor,
    terminations: torch.Tensor,
    dones: torch.Tensor,
    resets: torch.Tensor,
    args: Args,
) -> None:
    """Fills in the rollout's returns and mask.

    Args:
        rewards, terminations, dones, resets: [T, N]; flags as floats. ``resets`` marks steps that only reset.
    """
    values = q_network(rollout.obs).amax(-1)
    rollout.returns[:-1] = lambda_returns(rewards, values, terminations, dones, args.gamma, args.q_lambda)
    rollout.mask[:-1] = 1.0 - resets


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``x`` [B] over the rows where ``mask`` [B] is 1."""
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


class Losses(NamedTuple):
    """What an update logs, each a 0-d tensor."""

    td_loss: torch.Tensor
    q_values: torch.Tensor


def pqn_loss(q_network: QNetwork, minibatch: Minibatch) -> tuple[torch.Tensor, Losses]:
    """Mean squared error over one minibatch, and what is logged (detached)."""
    obs, actions, returns, mask = minibatch
    old_val = q_network(obs).gather(1, actions.unsqueeze(1)).squeeze(1)
    loss = masked_mean((old_val - returns) ** 2, mask)
    return loss, Losses(loss.detach(), masked_mean(old_val.detach(), mask))


def linear_schedule(args: Args, global_step: int) -> float:
    """The probability of a random action at ``global_step``."""
    progress = min(1.0, global_step / (args.exploration_fraction * args.total_timesteps))
    return args.start_e + (args.end_e - args.start_e) * progress


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(q_network: QNetwork, optimizer: Adam, rollout: Rollout, args: Args) -> Callable:
    """``update(mb_inds)``: takes one gradient step and returns the Losses, stacked [2]."""
    device_type = rollout.obs.device.type

    def update(mb_inds: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            loss, losses = pqn_loss(q_network, rollout.minibatch(mb_inds))
        loss.backward()
        # On a CPU, TorchInductor 2.13 generates slow code for the foreach norm.
        nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm, foreach=device_type == "cuda")
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses)

    return update


# ------------------------------------------------------------------------------------------------------------ ACTING


@torch.no_grad()
def greedy(q_network: QNetwork, obs: torch.Tensor) -> torch.Tensor:
    """The greedy actions: [N, obs_dim] -> [N]"""
    return q_network(obs).argmax(1)


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The greedy policy of a saved model: observations [N, obs_dim] -> actions [N]."""
    q_network = QNetwork(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    q_network.load_state_dict(model["q_network"])

    def policy(obs: np.ndarray) -> np.ndarray:
        return greedy(q_network, torch.as_tensor(obs, dtype=torch.float32)).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(q_network: QNetwork, update: Callable, args: Args, device: torch.device):
    """``greedy(obs)`` and ``update``, compiled and captured as the flags say."""
    # This halves the call's time with four environments, and saves a fifth with 32.
    as_sums = args.compile and device.type == "cpu" and args.num_envs <= 32
    network = partial(mlp_as_sums, q_network) if as_sums else q_network
    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs)
    return executable(partial(greedy, network)), executable(update)


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    set_cpu_numerics(update_threads(args.num_threads, minibatch_size), large_matmuls=False)
    if args.capture_video:
        require_video(args.env_id, args.env_backend)
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend, start=resumed_step(args.resume))
    require_discrete_actions(envs, args.env_id)
    obs_dim, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)

    seed_everything(args.seed)
    q_network = QNetwork(obs_dim, num_actions).to(device)
    optimizer = Adam(q_network.parameters(), lr=args.learning_rate, eps=1e-5)
    rollout = Rollout.allocate(args.num_steps, args.num_envs, obs_dim, device)
    update = make_update(q_network, optimizer, rollout, args)
    best_actions, update = make_executables(q_network, update, args, device)
    episodes = EpisodeStatistics(args.num_envs)

    def state_dict() -> dict:
        trained = {"q_network": q_network.state_dict(), "optimizer": optimizer.state_dict()}
        return {**trained, "envs": save_envs(envs, episodes)}

    with Run(args, __file__, device, total_steps=num_iterations * batch_size) as run:
        run.model = lambda: {"q_network": q_network.state_dict()}
        if run.resumed is not None:
            q_network.load_state_dict(run.resumed["q_network"])
            optimizer.load_state_dict(run.resumed["optimizer"])

        with run.warmup(), untouched([q_network.state_dict(), optimizer.state_dict()], device):
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                best_actions(rollout.obs[0])
                update(torch.arange(minibatch_size, device=device))

        # Actions and their outcomes, on the CPU until the end of the rollout.
        shape = args.num_steps, args.num_envs
        obs, rewards = np.zeros((args.num_steps + 1, args.num_envs, obs_dim), np.float32), np.zeros(shape)
        terminations, dones = np.zeros((2, *shape), bool)
        # last_dones: whether an environment's next step only resets it (NEXT_STEP autoreset).
        obs[-1], last_dones = start_envs(envs, episodes, run.resumed and run.resumed["envs"])
        run.restore_rng()
        run.start_clock()
        for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
            if run.stop_requested:
                break
            if args.anneal_lr:
                frac = 1.0 - (iteration - 1.0) / num_iterations
                optimizer.param_groups[0]["lr"].fill_(frac * args.learning_rate)

            epsilon = linear_schedule(args, run.global_step)
            explores = np.random.random(shape) < epsilon
            # Random actions; greedy ones replace those of the environments that do not explore.
            actions = np.random.randint(num_actions, size=shape)
            obs[0] = obs[-1]
            for step in range(args.num_steps):
                best = best_actions(torch.from_numpy(obs[step]).to(device))
                actions[step] = np.where(explores[step], actions[step], best.cpu().numpy())
                obs[step + 1], rewards[step], terminations[step], truncated, _ = envs.step(actions[step])
                dones[step] = terminations[step] | truncated
            run.global_step += batch_size

            resets = np.concatenate([last_dones[None], dones[:-1]])
            last_dones = dones[-1].copy()
            run.record_episodes(*episodes.add(rewards, dones, resets))
            rollout.obs.copy_(torch.from_numpy(obs))
            rollout.actions[:-1] = torch.from_numpy(actions)
            outcome = (torch.from_numpy(x).to(device, torch.float32) for x in (rewards, terminations, dones, resets))
            finish_rollout(q_network, rollout, *outcome, args)

            for _ in range(args.update_epochs):
                b_inds = torch.randperm(batch_size, device=device)
                for mb_inds in b_inds.split(minibatch_size):
                    losses = update(mb_inds)
                    run.optimizer_steps += 1

            losses = {f"losses/{name}": value for name, value in Losses(*losses.tolist())._asdict().items()}
            learning_rate = float(optimizer.param_groups[0]["lr"])
            run.log({"charts/learning_rate": learning_rate, "charts/epsilon": epsilon, **losses})
            if run.checkpoint_due():
                run.checkpoint(state_dict())

        run.finish(state_dict())
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
