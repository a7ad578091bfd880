"""Twin Delayed Deep Deterministic policy gradient (TD3), made fast with torch.compile and CUDA graphs.

The same program as td3_continuous_action.py: read that first, then diff the two to see what was made fast.
``--compile``, ``--cudagraphs`` and ``--one-graph`` (which implies the second) can be switched on independently.

    python leanrl/td3_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile
    python leanrl/td3_continuous_action_torchcompile.py --compile --amp bf16       # faster on CPUs with bf16 hardware
    python leanrl/td3_continuous_action_torchcompile.py --compile --cudagraphs     # on a CUDA device, or --one-graph

What differs (measured speed-ups: doc/optimizations.md):
- an environment step costs one copy to the device, one call and one copy back: the call writes the transition to the
  replay, samples a batch, trains critics and actor, updates the target networks, and acts;
  with more than one update per step, one call writes to the replay, one call does each update, and one acts;
- torch.compile traces ``loss.backward()`` and the step of our own Adam, so an update is one graph;
- with ``--one-graph`` a step is one CUDA graph, copies included (leanrl/support/onegraph.py).

Measured speed and learning curves: doc/benchmarks/td3_continuous_action.md
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, resolve_device, set_cpu_numerics
from leanrl.support.envs import EnvBackend, make_envs, require_continuous_actions, start_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import require_at_least, require_positive
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.layers import Float32Linear, Float32TwinLinear, TwinLinear
from leanrl.support.off_policy import OffPolicyState, named_losses, require_off_policy
from leanrl.support.onegraph import OneGraph
from leanrl.support.optim import Adam
from leanrl.support.replay import Batch, LastStep, Replay, TimestepBuffer
from leanrl.support.run import Run, seed_everything


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"
    """environment with continuous actions; Dict observations are flattened in the order of their keys"""
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

    compile: bool = False
    """compile the updates and acting with torch.compile"""
    cudagraphs: bool = False
    """replay the updates and acting as CUDA graphs (tensordict's CudaGraphModule)"""
    one_graph: bool = False
    """replay everything between two environment steps as one hand-captured CUDA graph (implies --cudagraphs)"""
    env_backend: EnvBackend = "gymnasium"
    """gymnasium steps the environments in this process, envpool on C++ threads (faster with many environments)"""

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
    actor_optimizer: Adam,
    q_optimizer: Adam,
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


def make_acting(actor: Actor, replay: Replay, last: LastStep, args: Args) -> tuple[Callable, ...]:
    """What happens between two environment steps, before and after the updates.

    Returns:
        ``observe(timestep)``: writes a transition to the replay; ``timestep`` [N, obs_dim + 3], the rows of a
        TimestepBuffer, is what the environments returned for ``last.actions``;
        ``act()``: the policy's actions [N, action_dim] with exploration noise;
        ``explore()``: random actions instead.
    """

    def observe(timestep: torch.Tensor) -> None:
        last.complete(replay, timestep)

    @torch.no_grad()
    def act() -> torch.Tensor:
        actions = actor(last.obs)
        noise = torch.randn_like(actions) * args.exploration_noise * actor.action_scale
        actions = (actions + noise).clamp(actor.low, actor.high)
        last.actions.copy_(actions)
        return actions

    def explore() -> torch.Tensor:
        return last.actions.copy_(actor.low + (actor.high - actor.low) * torch.rand_like(last.actions))

    return observe, act, explore


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The deterministic policy of a saved model: observations [N, obs_dim] -> actions [N, action_dim]."""
    space = envs.single_action_space
    actor = Actor(envs.single_observation_space.shape[0], space.low, space.high)
    actor.load_state_dict(model["actor"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        return actor(torch.as_tensor(obs, dtype=torch.float32)).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(observe: Callable, update: Callable, act: Callable, args: Args, device: torch.device) -> Callable:
    """The function ``advance(timestep_cpu, pattern) -> actions``, compiled and captured as the flags say.

    It observes, does one update for each entry of ``pattern`` (the update's arguments) and acts: in one executable with
    ``--one-graph`` or at most one update, else in one for each part. ``timestep_cpu`` is pinned if the device is a GPU.
    """
    # Each is compiled by its first call, so those that a run does not need cost nothing.
    compiled = partial(make_executable, device=device, compile=args.compile, cudagraphs=False)
    captured = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs)

    if args.one_graph:
        updates = cache(lambda *flags: compiled(partial(update, *flags)))
        return OneGraph(compiled(observe), updates, compiled(act), device)

    def step(pattern: tuple[tuple[bool, ...], ...], timestep: torch.Tensor) -> torch.Tensor:
        observe(timestep)
        for flags in pattern:
            update(*flags)
        return act()

    steps = cache(lambda pattern: captured(partial(step, pattern)))
    updates = cache(lambda *flags: captured(partial(update, *flags)))
    just_observe, just_act = captured(observe), captured(act)

    def advance(timestep_cpu: torch.Tensor, pattern: tuple[tuple[bool, ...], ...]) -> torch.Tensor:
        timestep = timestep_cpu.to(device, non_blocking=True)
        if len(pattern) <= 1:
            return steps(pattern)(timestep)
        just_observe(timestep)
        for flags in pattern:
            updates(*flags)()
        return just_act()

    return advance


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    validate(args)
    device = resolve_device(args)
    set_cpu_numerics(args.num_threads or available_cores(), large_matmuls=args.amp == "none")
    if args.capture_video:
        require_video(args.env_id, args.env_backend)
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend, start=resumed_step(args.resume))
    require_continuous_actions(envs, args.env_id)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    seed_everything(args.seed)
    actor = Actor(obs_dim, envs.single_action_space.low, envs.single_action_space.high).to(device)
    critics = Critics(obs_dim, action_dim).to(device)
    actor_target, critics_target = deepcopy(actor), deepcopy(critics)
    actor_optimizer = Adam(actor.parameters(), lr=args.learning_rate)
    q_optimizer = Adam(critics.parameters(), lr=args.learning_rate)
    replay = Replay(args.buffer_size, obs_dim, action_dim, device)
    update, losses = make_update(
        actor, critics, actor_target, critics_target, actor_optimizer, q_optimizer, replay, args
    )
    last = LastStep.allocate(args.num_envs, obs_dim, action_dim, device)
    observe, act, explore = make_acting(actor, replay, last, args)
    advance = make_executables(observe, update, act, args, device)
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
        next_actions=last.actions,
    )

    with Run(args, __file__, device, total_steps=args.total_timesteps // args.num_envs * args.num_envs) as run:
        run.model = lambda: {"actor": actor.state_dict()}
        schedule = state.resume(run)  # of updates: --learning-starts and --updates-per-step

        timestep_buffer = TimestepBuffer(args.num_envs, obs_dim, device)
        with run.warmup(), untouched([*state.tensors(), *last], device):
            # This step is a reset, so it is not stored; the replay must pretend to have a transition to sample.
            timestep_cpu = timestep_buffer.write(0.0, 0.0, 0.0, dones=1.0)
            last.resets.fill_(1.0)
            replay.size.clamp_(min=1)
            for pattern in schedule.patterns(args.policy_frequency):
                for _ in range(WARMUP_CALLS if args.cudagraphs else 1):
                    advance(timestep_cpu, pattern)

        # resets: whether an environment's next step only resets it (NEXT_STEP autoreset).
        obs, resets = start_envs(envs, episodes, run.resumed and run.resumed["envs"])
        last.obs.copy_(torch.from_numpy(obs))
        last.resets.copy_(torch.from_numpy(resets))
        run.restore_rng()
        if run.resumed is not None and run.resumed["envs"] is not None:
            actions = last.actions  # those chosen when the run was interrupted
        else:
            actions = explore() if run.global_step < args.learning_starts else act()
        run.start_clock()
        while run.global_step < run.total_steps and not run.stop_requested:
            next_obs, rewards, terminations, truncations, _ = envs.step(actions.cpu().numpy())
            dones = terminations | truncations
            run.global_step += args.num_envs
            run.record_episodes(*episodes.add_step(rewards, dones, resets))
            resets = dones

            timestep_cpu = timestep_buffer.write(next_obs, rewards, terminations, dones)
            due = schedule.due(run.global_step)
            if schedule.begins(run.global_step):
                run.start_clock()
            if run.global_step < args.learning_starts:
                observe(timestep_cpu.to(device, non_blocking=True))
                actions = explore()
            else:
                first = run.optimizer_steps + 1
                run.optimizer_steps += due
                pattern = tuple((n % args.policy_frequency == 0,) for n in range(first, first + due))
                actions = advance(timestep_cpu, pattern)  # stores the transition, trains, acts

            if run.log_due():
                run.log(named_losses(run, losses))
            if run.checkpoint_due():
                run.checkpoint(state.state_dict())

        run.finish(state.state_dict())
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
