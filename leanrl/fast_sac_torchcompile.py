"""FastSAC, made fast with torch.compile and CUDA graphs.

The same program as fast_sac.py: read that first, then diff the two to see what was made fast.
``--compile``, ``--cudagraphs`` and ``--one-graph`` (which implies the second) can be switched on independently.

    python leanrl/fast_sac_torchcompile.py --env-id HalfCheetah-v5 --compile --env-backend envpool
    python leanrl/fast_sac_torchcompile.py --compile --amp bf16       # faster on CPUs with bf16 hardware
    python leanrl/fast_sac_torchcompile.py --compile --cudagraphs     # on a CUDA device, or --one-graph

What differs (speed-ups measured for SAC: doc/optimizations.md):
- a step of the environments costs one copy to the device, one call and one copy back; with more than one update per
  step, one call writes to the replay, one call does each update, and one acts;
- torch.compile traces ``loss.backward()`` and the step of our own Adam, so an update is one graph;
- with ``--one-graph`` a step is one CUDA graph, copies included (leanrl/support/onegraph.py).

With most of the paper's hyperparameters, for a GPU (untested; without its AdamW and its cap of log_std at 0):

    python leanrl/fast_sac_torchcompile.py --compile --cudagraphs --env-backend envpool --num-envs 4096 \\
        --updates-per-step 0.001953125 --batch-size 8192 --buffer-size 4194304 --policy-frequency 4 --policy-lr 3e-4 \\
        --q-lr 3e-4 --gamma 0.97 --num-atoms 101 --v-min -20 --v-max 20 --alpha 0.001 --target-entropy-ratio 0 \\
        --learning-starts 40960
"""

import math
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
from torch.distributions.normal import Normal

from leanrl.support.checkpoints import resumed_step
from leanrl.support.cli import RunArgs, run_script
from leanrl.support.devices import available_cores, resolve_device, set_cpu_numerics
from leanrl.support.envs import EnvBackend, make_envs, require_continuous_actions, start_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive
from leanrl.support.evaluation import require_video
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.layers import Float32LayerNorm, Float32Linear, Float32TwinLayerNorm, Float32TwinLinear, TwinLinear
from leanrl.support.normalization import RunningMoments
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
    """bf16 runs the networks of the update under autocast, except their layer norms and their first and last layers"""
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

    policy_lr: float = 1e-3
    """learning rate of the actor's Adam"""
    q_lr: float = 1e-3
    """learning rate of the critics' Adam, and of the entropy coefficient's"""
    num_envs: int = 16
    """environments stepped together"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.125
    """weight of the trained networks in the Polyak average of the target networks"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 5_000
    """environment steps with random actions before the first update"""
    updates_per_step: float = 0.25
    """critic updates per environment step; one step of N environments counts as N, resets included"""
    policy_frequency: int = 2
    """critic updates per actor update"""
    num_atoms: int = 51
    """atoms of the critics' return distributions, evenly spaced from --v-min to --v-max"""
    v_min: float = -100.0
    """lowest return that the critics can predict"""
    v_max: float = 1_000.0
    """highest return that the critics can predict"""
    autotune: bool = True
    """learn the entropy coefficient, for the target entropy that --target-entropy-ratio sets"""
    alpha: float = 1.0
    """the entropy coefficient; with --autotune, its initial value"""
    target_entropy_ratio: float = 1.0
    """target entropy of --autotune, in units of minus the number of action dimensions"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_off_policy(args)
    require_at_least(args, 1, "policy_frequency")
    require_at_least(args, 2, "num_atoms")
    require_at_least(args, 0, "target_entropy_ratio")
    require_positive(args, "policy_lr", "q_lr", "alpha")
    if not -math.inf < args.v_min < args.v_max < math.inf:
        raise bad("v_max", args.v_max, f"must be above --v-min {args.v_min}, and both must be finite")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


class Critics(nn.Module):
    """Two distributional Q-networks, side by side: each predicts probabilities of the returns ``atoms`` [num_atoms]."""

    def __init__(self, obs_dim: int, action_dim: int, args: Args) -> None:
        super().__init__()
        self.fc1 = Float32TwinLinear(obs_dim + action_dim, 256)
        self.norm1 = Float32TwinLayerNorm(256)
        self.fc2 = TwinLinear(256, 128)
        self.norm2 = Float32TwinLayerNorm(128)
        self.fc3 = Float32TwinLinear(128, args.num_atoms)
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.num_atoms))
        # The first predictions are near 0: bootstrapping is slow to forget its initial values.
        nn.init.zeros_(self.fc3.weight)
        with torch.no_grad():
            self.fc3.bias.copy_(-self.atoms.abs() / (self.atoms[1] - self.atoms[0]))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """[B, obs_dim], [B, action_dim] -> logits [2, B, num_atoms]"""
        x = torch.cat([obs, actions], 1).expand(2, -1, -1)
        x = F.relu(self.norm1(self.fc1(x)))
        x = F.relu(self.norm2(self.fc2(x)))
        return self.fc3(x)

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """The expected returns: [2, B, num_atoms] -> [2, B]"""
        return (logits.softmax(-1) * self.atoms).sum(-1)


LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class Actor(nn.Module):
    """The policy: a normal distribution squashed by tanh into the bounds ``low`` and ``high`` [action_dim]."""

    def __init__(self, obs_dim: int, low: np.ndarray, high: np.ndarray) -> None:
        super().__init__()
        self.fc1 = Float32Linear(obs_dim, 256)
        self.norm1 = Float32LayerNorm(256)
        self.fc2 = nn.Linear(256, 128)
        self.norm2 = Float32LayerNorm(128)
        self.fc_heads = Float32Linear(128, 2 * len(low))
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))
        self.register_buffer("action_scale", (self.high - self.low) / 2)
        self.register_buffer("action_bias", (self.high + self.low) / 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, obs_dim] -> mean and log standard deviation before squashing, each [B, action_dim]"""
        x = F.relu(self.norm1(self.fc1(obs)))
        x = F.relu(self.norm2(self.fc2(x)))
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
        # The density of the squashed action: https://arxiv.org/abs/1812.05905, equation 26.
        log_prob = log_prob - torch.log(self.action_scale * (1 - y_t**2) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1)


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def project(probs: torch.Tensor, returns: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
    """C51's categorical projection (https://arxiv.org/abs/1707.06887): splits a return between neighbouring atoms.

    Args:
        probs: of the returns, [B, num_atoms].
        returns: [B, num_atoms]; clamped to the range of ``atoms``.
        atoms: evenly spaced, [num_atoms].

    Returns:
        The probabilities of ``atoms``, [B, num_atoms].
    """
    places = ((returns - atoms[0]) / (atoms[1] - atoms[0])).clamp(0, len(atoms) - 1)
    lower = places.long().clamp(max=len(atoms) - 2)
    share = places - lower  # of the upper neighbour
    projected = torch.zeros_like(probs).scatter_add(1, lower, probs * (1 - share))
    return projected.scatter_add(1, lower + 1, probs * share)


def target_distribution(
    critics_target: Critics,
    next_actions: torch.Tensor,
    next_log_pi: torch.Tensor,
    alpha: torch.Tensor,
    batch: Batch,
    args: Args,
) -> torch.Tensor:
    """The critics' target: the distribution of the soft value, averaged over two critics.

    Args:
        next_actions, next_log_pi: the policy's for ``batch.next_obs``, [B, action_dim] and [B].
        alpha: entropy coefficient, [1].

    Returns:
        The probabilities of the critics' atoms, [B, num_atoms].
    """
    logits, atoms = critics_target(batch.next_obs, next_actions), critics_target.atoms
    probs = logits.softmax(-1).mean(0)
    discounts = args.gamma * (1.0 - batch.terminations)
    returns = (batch.rewards - discounts * alpha * next_log_pi).unsqueeze(1) + discounts.unsqueeze(1) * atoms
    return project(probs, returns, atoms)


def critic_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each critic: [2, B, num_atoms], [B, num_atoms] -> [2]"""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(1)


def actor_loss(
    actor: Actor, critics: Critics, alpha: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """SAC's loss with the mean of both critics, averaged over ``obs`` [B, obs_dim]."""
    actions, log_pi = actor.get_action(obs, noise)
    return (alpha * log_pi - critics.values(critics(obs, actions)).mean(0)).mean()


def alpha_loss(log_alpha: torch.Tensor, log_pi: torch.Tensor, target_entropy: float) -> torch.Tensor:
    """SAC's loss for the entropy coefficient, from log-probabilities [B] of the policy's own actions."""
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
    actor_optimizer: Adam,
    q_optimizer: Adam,
    a_optimizer: Adam,
    obs_moments: RunningMoments,
    replay: Replay,
    args: Args,
) -> tuple[Callable, Losses]:
    """The function that trains on one batch, and the losses that it writes.

    ``update(with_actor)``: every update trains the critics and, with ``--autotune``, the entropy coefficient
    ``log_alpha.exp()``; the flag says whether this one also trains the actor.
    """
    device = replay.rows.device
    target_entropy = -args.target_entropy_ratio * len(actor.low)
    losses = Losses(*(torch.zeros(size, device=device) for size in (2, 2, 1, 1, 1)))
    losses.alpha.copy_(log_alpha.detach().exp())
    params, target_params = list(critics.parameters()), list(critics_target.parameters())

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    def update(with_actor: bool) -> None:
        batch = replay.sample(args.batch_size)
        batch = batch._replace(obs=obs_moments(batch.obs), next_obs=obs_moments(batch.next_obs))
        # Drawn all at once: PyTorch before 2.13 may reorder the draws of a compiled update (pytorch/pytorch#181136).
        draws = batch.actions.new_empty(1 + with_actor, *batch.actions.shape).normal_()
        with autocast():
            with torch.no_grad():
                next_actions, next_log_pi = actor.get_action(batch.next_obs, draws[0])
                target = target_distribution(critics_target, next_actions, next_log_pi, log_alpha.exp(), batch, args)
            logits = critics(batch.obs, batch.actions)
            qf_loss = critic_loss(logits, target)
        qf_loss.sum().backward()
        q_optimizer.step()
        q_optimizer.zero_grad()
        losses.qf_values.copy_(critics.values(logits.detach()).mean(1))
        losses.qf_loss.copy_(qf_loss.detach())

        if args.autotune:
            a_loss = alpha_loss(log_alpha, next_log_pi, target_entropy)
            a_loss.backward()
            a_optimizer.step()
            a_optimizer.zero_grad()
            losses.alpha_loss.copy_(a_loss.detach())
            losses.alpha.copy_(log_alpha.detach().exp())

        if with_actor:
            with autocast():
                pi_loss = actor_loss(actor, critics, log_alpha.detach().exp(), batch.obs, draws[1])
            pi_loss.backward(inputs=list(actor.parameters()))
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            losses.actor_loss.copy_(pi_loss.detach())

        with torch.no_grad():
            torch._foreach_lerp_(target_params, params, args.tau)

    return update, losses


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_acting(actor: Actor, obs_moments: RunningMoments, replay: Replay, last: LastStep) -> tuple[Callable, ...]:
    """What happens between two environment steps, before and after the updates.

    Returns:
        ``observe(timestep)``: writes a transition to the replay, and adds its next observation to the moments;
        ``timestep`` [N, obs_dim + 3], the rows of a TimestepBuffer, is what the environments returned for
        ``last.actions``;
        ``act()``: actions [N, action_dim] sampled from the policy;
        ``explore()``: random actions instead.
    """

    def observe(timestep: torch.Tensor) -> None:
        last.complete(replay, timestep)
        obs_moments.update(last.obs)

    @torch.no_grad()
    def act() -> torch.Tensor:
        actions, _ = actor.get_action(obs_moments(last.obs), torch.randn_like(last.actions))
        last.actions.copy_(actions)
        return actions

    def explore() -> torch.Tensor:
        return last.actions.copy_(actor.low + (actor.high - actor.low) * torch.rand_like(last.actions))

    return observe, act, explore


def load_policy(model: dict, envs: gym.vector.VectorEnv) -> Callable[[np.ndarray], np.ndarray]:
    """The deterministic policy of a saved model: observations [N, obs_dim] -> actions [N, action_dim]."""
    space, obs_dim = envs.single_action_space, envs.single_observation_space.shape[0]
    actor, obs_moments = Actor(obs_dim, space.low, space.high), RunningMoments((obs_dim,))
    actor.load_state_dict(model["actor"])
    obs_moments.load_state_dict(model["obs_rms"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        mean, _ = actor(obs_moments(torch.as_tensor(obs, dtype=torch.float32)))
        return (torch.tanh(mean) * actor.action_scale + actor.action_bias).numpy()

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
    set_cpu_numerics(args.num_threads or available_cores())
    if args.capture_video:
        require_video(args.env_id, args.env_backend)
    envs = make_envs(args.env_id, args.num_envs, args.seed, args.env_backend, start=resumed_step(args.resume))
    require_continuous_actions(envs, args.env_id)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]

    seed_everything(args.seed)
    actor = Actor(obs_dim, envs.single_action_space.low, envs.single_action_space.high).to(device)
    critics = Critics(obs_dim, action_dim, args).to(device)
    critics_target = deepcopy(critics)
    log_alpha = torch.tensor([args.alpha], device=device).log().requires_grad_()
    actor_optimizer = Adam(actor.parameters(), lr=args.policy_lr)
    q_optimizer = Adam(critics.parameters(), lr=args.q_lr)
    a_optimizer = Adam([log_alpha], lr=args.q_lr)
    obs_moments = RunningMoments((obs_dim,)).to(device)
    replay = Replay(args.buffer_size, obs_dim, action_dim, device)
    update, losses = make_update(
        actor, critics, critics_target, log_alpha, actor_optimizer, q_optimizer, a_optimizer, obs_moments, replay, args
    )
    last = LastStep.allocate(args.num_envs, obs_dim, action_dim, device)
    observe, act, explore = make_acting(actor, obs_moments, replay, last)
    advance = make_executables(observe, update, act, args, device)
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
        obs_rms=obs_moments,
        **losses._asdict(),
        next_actions=last.actions,
    )

    with Run(args, __file__, device, total_steps=args.total_timesteps // args.num_envs * args.num_envs) as run:
        run.model = lambda: {"actor": actor.state_dict(), "obs_rms": obs_moments.state_dict()}
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
