"""Parallelised Q-Network (PQN) on Atari games over EnvPool, made fast with torch.compile and CUDA graphs.

The same program as pqn_atari_envpool.py: read that first, then diff the two to see what was made fast.
``--compile`` and ``--cudagraphs`` can be switched on independently.

    python leanrl/pqn_atari_envpool_torchcompile.py --env-id Breakout-v5 --compile
    python leanrl/pqn_atari_envpool_torchcompile.py --env-id Pong-v5 --compile --amp bf16
    python leanrl/pqn_atari_envpool_torchcompile.py --compile --cudagraphs     # on a CUDA device

What differs:
- an environment step costs one call: act and write to the rollout;
- a minibatch costs one call: gather, loss, backward, clipping and our own Adam, which torch.compile can trace, are one
  graph;
- acting uses one thread and leaves the other cores to the environments.

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

from leanrl.support.atari import CLEANRL, make_atari_envs, whole_games
from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, keep_freed_memory, resolve_device, set_cpu_numerics
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.layers import ChannelsLastLayerNorm, ChannelsLastLinear, Float32Linear, interleaved
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
    """bf16 runs the network under autocast, except for its last layer"""
    num_threads: int | None = None
    """CPU threads of the update; by default all cores. Acting uses 1."""
    compile: bool = False
    """compile the policy step and the update with torch.compile"""
    cudagraphs: bool = False
    """replay the policy step and the update as CUDA graphs (tensordict's CudaGraphModule)"""

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
    end_e: float = 0.01
    """probability of a random action after the exploration fraction"""
    exploration_fraction: float = 0.1
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


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class QNetwork(nn.Sequential):
    """The value of each action: uint8 [B, 4, 84, 84] -> [B, num_actions]

    The network of https://doi.org/10.1038/nature14236 with layer norms, which make a target network unnecessary.
    """

    def __init__(self, num_actions: int) -> None:
        super().__init__(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            ChannelsLastLayerNorm((20, 20, 32)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            ChannelsLastLayerNorm((9, 9, 64)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            ChannelsLastLayerNorm((7, 7, 64)),
            nn.ReLU(),
            layer_init(ChannelsLastLinear(64 * 7 * 7, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
            layer_init(Float32Linear(512, num_actions)),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs / 255.0)


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


class Minibatch(NamedTuple):
    """Steps to learn from, each [B, ...]."""

    obs: torch.Tensor
    actions: torch.Tensor
    values: torch.Tensor  # of the best actions; used for the returns only
    returns: torch.Tensor
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
            *(torch.zeros(shape, device=obs.device) for _ in range(3)),
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


def finish_rollout(
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
    rollout.returns[:-1] = lambda_returns(rewards, rollout.values, terminations, dones, args.gamma, args.q_lambda)
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
    obs, actions, _, returns, mask = minibatch
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


def make_policy_step(q_network: QNetwork, rollout: Rollout, args: Args) -> tuple[Callable, Callable]:
    """The functions that act.

    Returns:
        ``policy_step(obs)``: [N, ...] -> best actions [N]; writes the rollout's next row of observations and values;
        ``start()``: rewinds to the first row; call it before each rollout.
    """
    device_type = rollout.obs.device.type
    row = torch.zeros(1, dtype=torch.int64, device=rollout.obs.device)  # where the next step goes
    # In memory order: with any other view, TorchInductor would copy all steps to write one.
    frames = rollout.obs.movedim(2, -1)

    @torch.no_grad()
    def policy_step(obs: torch.Tensor) -> torch.Tensor:
        if args.compile and device_type == "cpu":
            obs = interleaved(obs)
        with torch.autocast(device_type, torch.bfloat16, enabled=args.amp == "bf16"):
            values, actions = q_network(obs).max(1)
        frames.index_copy_(0, row, obs.movedim(1, -1).unsqueeze(0))
        rollout.values.index_copy_(0, row, values.unsqueeze(0))
        row.add_(1)
        return actions

    return policy_step, row.zero_


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The greedy policy of a saved model: observations uint8 [N, 4, 84, 84] -> actions [N]."""
    q_network = QNetwork(int(envs.single_action_space.n))
    q_network.load_state_dict(model["q_network"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        return q_network(torch.from_numpy(obs)).argmax(1).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(policy_step: Callable, update: Callable, args: Args, device: torch.device) -> tuple[Callable, ...]:
    """``policy_step`` and ``update``, compiled and captured as the flags say."""
    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs)
    return executable(policy_step), executable(update)


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
    envs = make_atari_envs(args.env_id, args.num_envs, args.seed, PROTOCOL, start=resumed_step(args.resume))
    if args.capture_video:
        require_video(args.env_id, "envpool")
    num_actions = int(envs.single_action_space.n)

    seed_everything(args.seed)
    q_network = QNetwork(num_actions).to(device, memory_format=torch.channels_last)
    optimizer = Adam(q_network.parameters(), lr=args.learning_rate, eps=1e-5)
    next_obs = torch.from_numpy(envs.reset()[0]).to(device)
    rollout = Rollout.allocate(next_obs, args)
    policy_step, start_rollout = make_policy_step(q_network, rollout, args)
    update = make_update(q_network, optimizer, rollout, args)
    policy_step, update = make_executables(policy_step, update, args, device)
    games = EpisodeStatistics(args.num_envs)

    def state_dict() -> dict:
        return {"q_network": q_network.state_dict(), "optimizer": optimizer.state_dict()}

    with Run(args, __file__, device, total_steps=num_iterations * batch_size) as run:
        run.model = lambda: {"q_network": q_network.state_dict()}
        if run.resumed is not None:
            q_network.load_state_dict(run.resumed["q_network"])
            optimizer.load_state_dict(run.resumed["optimizer"])

        with run.warmup(), untouched(state_dict(), device):
            # TorchInductor compiles the number of threads into CPU kernels, so each function is compiled with its own.
            for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                start_rollout()
                torch.set_num_threads(1)
                policy_step(next_obs)
                torch.set_num_threads(num_threads)
                update(torch.arange(batch_size // args.num_minibatches, device=device))

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

            epsilon = linear_schedule(args, run.global_step)
            explores = np.random.random(shape) < epsilon
            # Random actions; greedy ones replace those of the environments that do not explore.
            actions = np.random.randint(num_actions, size=shape)
            # A second PyTorch thread would spin while it waits for work, on a core that the environments need.
            torch.set_num_threads(1)
            start_rollout()
            for step in range(args.num_steps):
                best = policy_step(next_obs).cpu().numpy()
                actions[step] = np.where(explores[step], actions[step], best)
                next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
                next_obs = torch.from_numpy(next_obs).to(device)
                done = terminated | truncated
                rewards[step], terminations[step], dones[step] = reward, terminated, done
                scores[step], game_ends[step] = whole_games(reward, done, infos)
            policy_step(next_obs)  # for the value of the last observation
            torch.set_num_threads(num_threads)
            run.global_step += batch_size

            # Where a step only resets its environment (NEXT_STEP autoreset).
            resets = np.concatenate([last_dones[None], dones[:-1]])
            last_dones = dones[-1].copy()
            # A lost life ends the training episode, but whole games are reported.
            run.record_episodes(*games.add(scores, game_ends, resets))
            rollout.actions[:-1] = torch.from_numpy(actions)
            outcome = (torch.from_numpy(x).to(device, torch.float32) for x in (rewards, terminations, dones, resets))
            finish_rollout(rollout, *outcome, args)

            for _ in range(args.update_epochs):
                b_inds = torch.randperm(batch_size, device=device)
                for mb_inds in b_inds.split(batch_size // args.num_minibatches):
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
