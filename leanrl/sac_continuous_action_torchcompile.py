"""Soft Actor-Critic (SAC), made fast with torch.compile and CUDA graphs.

The same algorithm and numbers as sac_continuous_action.py (read that first; a diff of the two is the documentation of
what was made fast). ``--compile`` and ``--cudagraphs`` switch each lever by itself.

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v5 --compile
    python leanrl/sac_continuous_action_torchcompile.py --compile --amp bf16       # faster where there are bf16 units
    python leanrl/sac_continuous_action_torchcompile.py --compile --cudagraphs     # on a CUDA device

What is different, most of it with its measured gain in doc/optimizations.md:
- a step of the environment costs one copy in, one call and one copy out: the call writes the transition to the replay,
  samples a batch, trains critics, actor and entropy coefficient, moves the targets, and acts;
- the critics are one network with a batch dimension of two;
- gradients by torch.func, Adam and the targets' averages over one flat vector each;
- the policy that the entropy coefficient is tuned for is the one that the next actor step starts from: in one graph,
  the compiler computes it once.

Measured speed and learning curves: doc/benchmarks/sac_continuous_action.md
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

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
from leanrl.support.inductor import computed_once
from leanrl.support.off_policy import OffPolicyState, named_losses, require_off_policy
from leanrl.support.optim import FlatAdam
from leanrl.support.replay import Batch, LastStep, Replay, TimestepBuffer
from leanrl.support.run import Run, seed_everything


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"
    """Gymnasium environment with continuous actions"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, rounded down to whole steps of all environments"""
    seed: int = 1
    """seed of the environments, the networks, the sampling and the noise"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the networks of the update under autocast"""
    num_threads: int | None = None
    """CPU threads of PyTorch; by default all cores"""
    log_every: int = 1_000
    """environment steps between log points"""
    checkpoint_replay: bool = True
    """write the replay into checkpoints; without it a resumed run fills a new one before it trains on"""

    compile: bool = False
    """compile the training step with torch.compile"""
    cudagraphs: bool = False
    """replay the training step as a CUDA graph (tensordict's CudaGraphModule)"""
    env_backend: EnvBackend = "gymnasium"
    """gymnasium steps the environments in this process, envpool on C++ threads (faster with many environments)"""

    policy_lr: float = 3e-4
    """learning rate of the actor's Adam"""
    q_lr: float = 1e-3
    """learning rate of the critics' Adam, and of the entropy coefficient's"""
    num_envs: int = 1
    """environments stepped together"""
    buffer_size: int = 1_000_000
    """transitions that the replay keeps"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """Polyak averaging of the target networks: the weight of the trained ones in an update"""
    batch_size: int = 256
    """transitions of an update"""
    learning_starts: int = 5_000
    """environment steps with random actions before the first update"""
    updates_per_step: float = 1.0
    """updates of the critics per transition: N environments, which make N of them at a step, get N times as many"""
    policy_frequency: int = 2
    """train the actor after so many updates of the critics, and then as many times in a row"""
    target_network_frequency: int = 1
    """updates of the critics for each update of the targets"""
    autotune: bool = True
    """learn the entropy coefficient, so that the policy's entropy is about minus the number of action dimensions"""
    alpha: float = 0.2
    """the entropy coefficient without --autotune"""


def validate(args: Args) -> None:
    """Raises UsageError on the first argument that cannot work."""
    require_off_policy(args)
    require_at_least(args, 1, "policy_frequency", "target_network_frequency")
    require_at_least(args, 0, "alpha")
    require_positive(args, "policy_lr", "q_lr")


# ---------------------------------------------------------------------------------------------------------- NETWORKS


class Critics(nn.Module):
    """Two independent Q-networks in one: each parameter has a leading dimension of 2, products are batched over it."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        sizes = (obs_dim + action_dim, 256, 256, 1)
        qfs = [[nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(sizes)] for _ in range(2)]
        for i, pair in enumerate(zip(*qfs, strict=True), start=1):
            weights = torch.stack([layer.weight.detach().T for layer in pair])  # [2, in, out]
            biases = torch.stack([layer.bias.detach() for layer in pair]).unsqueeze(1)  # [2, 1, out]
            self.register_parameter(f"weight{i}", nn.Parameter(weights))
            self.register_parameter(f"bias{i}", nn.Parameter(biases))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor, count: int = 2) -> torch.Tensor:
        """[B, obs_dim], [B, action_dim] -> [count, B], the values of the first ``count`` networks"""
        x = torch.cat([obs, actions], 1).expand(count, -1, -1)
        # Not baddbmm: TorchInductor fuses the sum with the relu, but has no way into a library's product.
        x = F.relu(torch.bmm(x, self.weight1[:count]) + self.bias1[:count])
        x = F.relu(torch.bmm(x, self.weight2[:count]) + self.bias2[:count])
        # One output: a sum is faster than a product of matrices.
        return (x * self.weight3[:count].mT).sum(-1) + self.bias3[:count, 0]


LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class Actor(nn.Module):
    """The policy: a normal distribution squashed by tanh into the bounds ``low`` and ``high`` [action_dim]."""

    def __init__(self, obs_dim: int, low: np.ndarray, high: np.ndarray) -> None:
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        # Mean and log_std in one product.
        heads = [nn.Linear(256, len(low)) for _ in range(2)]
        self.fc_heads = nn.utils.skip_init(nn.Linear, 256, 2 * len(low))
        self.fc_heads.weight = nn.Parameter(torch.cat([head.weight.detach() for head in heads]))
        self.fc_heads.bias = nn.Parameter(torch.cat([head.bias.detach() for head in heads]))
        self.register_buffer("low", torch.as_tensor(low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(high, dtype=torch.float32))
        self.register_buffer("action_scale", (self.high - self.low) / 2)
        self.register_buffer("action_bias", (self.high + self.low) / 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, obs_dim] -> mean and log standard deviation before the squashing, [B, action_dim] each"""
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        # float: under autocast the last layer's output has the precision of bfloat16.
        mean, log_std = self.fc_heads(x).float().chunk(2, 1)
        log_std = torch.tanh(log_std)
        # From https://github.com/denisyarats/pytorch_sac; a clamp would have no gradient beyond its ends.
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)


def squash(
    actor: Actor, mean: torch.Tensor, log_std: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples: what ``actor`` says and standard normal noise, [B, action_dim] each -> action, its log-probability [B]

    What the reference's get_action computes by torch.distributions, less its checks and objects.
    """
    y_t = torch.tanh(mean + log_std.exp() * noise)
    log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    # The density of the squashed action: the paper's equation 26.
    log_prob = log_prob - torch.log(actor.action_scale * (1 - y_t**2) + 1e-6)
    return y_t * actor.action_scale + actor.action_bias, log_prob.sum(1)


# ------------------------------------------------------------------------------------------------ TARGETS AND LOSSES


def sac_target(
    actor: Callable, critics_target: Callable, alpha: torch.Tensor, batch: Batch, noise: torch.Tensor, args: Args
) -> torch.Tensor:
    """What the critics should say: the soft value (the paper's equations 3 and 5), by the lower of two critics.

    Args:
        actor: observations, noise -> actions, log-probabilities.
        critics_target: the critics with the targets' parameters.
        alpha: entropy coefficient, [1].
        noise: standard normal, [B, action_dim].

    Returns:
        [B]
    """
    next_actions, next_log_pi = actor(batch.next_obs, noise)
    min_qf_next_target = critics_target(batch.next_obs, next_actions).amin(0) - alpha * next_log_pi
    return batch.rewards + args.gamma * (1.0 - batch.terminations) * min_qf_next_target


def critic_loss(q_values: torch.Tensor, next_q_value: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each critic: [2, B], [B] -> [2]"""
    return ((q_values - next_q_value) ** 2).mean(1)


def actor_loss(
    actor: Callable, critics: Callable, alpha: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The paper's equation 7, averaged over ``obs`` [B, obs_dim]."""
    actions, log_pi = actor(obs, noise)
    return (alpha * log_pi - critics(obs, actions).amin(0)).mean()


def alpha_loss(log_alpha: torch.Tensor, log_pi: torch.Tensor, target_entropy: float) -> torch.Tensor:
    """The paper's equation 18, for log-probabilities [B] of the policy's own actions."""
    return (-log_alpha.exp() * (log_pi + target_entropy)).mean()


LOSS_NAMES = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "actor_loss", "alpha", "alpha_loss")


class Temperature(nn.Module):
    """The entropy coefficient as a network of one parameter, for FlatAdam."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([alpha]).log())


# ------------------------------------------------------------------------------------------------------------ UPDATE


def make_update(
    actor_optimizer: FlatAdam,
    q_optimizer: FlatAdam,
    a_optimizer: FlatAdam,
    critics_target: torch.Tensor,
    replay: Replay,
    args: Args,
) -> tuple[Callable, torch.Tensor]:
    """The function ``update(with_actor)`` that trains on one batch, and the losses [7] (LOSS_NAMES) that it writes.

    Args:
        critics_target: flat vector of parameters.
    """
    device = replay.rows.device
    target_entropy = -float(len(actor_optimizer.module.low))
    losses = torch.zeros(len(LOSS_NAMES), device=device)
    losses[5] = a_optimizer.params[0].exp()

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    def get_action(params: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return squash(actor_optimizer.module, *actor_optimizer.apply(params, obs), noise)

    def update(with_actor: bool) -> None:
        batch = replay.sample(args.batch_size)
        # All here, in the order of their use: where PyTorch 2.11 compiles a whole step, it takes what an update depends
        # on in the order of its buffers' names, "buf100" before "buf87", and with it the drawing of noise.
        num_draws = 1 + with_actor * args.policy_frequency * (1 + args.autotune)
        noises = iter([torch.randn_like(batch.actions) for _ in range(num_draws)])
        noise = next(noises)
        with autocast():
            actor = partial(get_action, actor_optimizer.params)
            target = partial(q_optimizer.apply, critics_target)
            next_q_value = sac_target(actor, target, a_optimizer.params.exp(), batch, noise, args)

        def qf_loss_fn(params: torch.Tensor):
            with autocast():
                q_values = q_optimizer.apply(params, batch.obs, batch.actions)
                qf_losses = critic_loss(q_values, next_q_value)
            return qf_losses.sum(), torch.cat([q_values.mean(1), qf_losses])

        # torch.func instead of .backward(), which breaks the graph in three.
        grad, parts = torch.func.grad(qf_loss_fn, has_aux=True)(q_optimizer.params)
        q_optimizer.step(grad)
        losses[:4] = parts

        if with_actor:
            for _ in range(args.policy_frequency):  # makes up for the delay
                noise = next(noises)
                critics = partial(q_optimizer.apply, q_optimizer.params)

                def actor_loss_fn(params: torch.Tensor, noise=noise, critics=critics):
                    with autocast():
                        pi_loss = actor_loss(
                            partial(get_action, params), critics, a_optimizer.params.exp(), batch.obs, noise
                        )
                    return pi_loss, pi_loss

                grad, pi_loss = torch.func.grad(actor_loss_fn, has_aux=True)(actor_optimizer.params)
                actor_optimizer.step(grad)
                losses[4] = pi_loss

                if args.autotune:
                    with autocast():
                        _, log_pi = get_action(actor_optimizer.params, batch.obs, next(noises))
                    a_loss = alpha_loss(a_optimizer.params, log_pi, target_entropy)
                    # alpha_loss is linear in alpha = exp(log_alpha), so it is its own derivative by log_alpha.
                    a_optimizer.step(a_loss.unsqueeze(0))
                    losses[6] = a_loss
                losses[5] = a_optimizer.params[0].exp()

        # On the device, because an update does not know its number: the targets' turn, or a step of 0.
        is_due = computed_once((q_optimizer.num_steps % args.target_network_frequency == 0).float())
        critics_target.add_((args.tau * is_due) * (q_optimizer.params - critics_target))

    return update, losses


# ------------------------------------------------------------------------------------------------------------ ACTING


def make_acting(actor_optimizer: FlatAdam, replay: Replay, last: LastStep) -> tuple[Callable, ...]:
    """What happens between two steps of the environments, around the updates.

    Returns:
        ``observe(timestep)``: writes a transition to the replay; ``timestep`` [N, obs_dim + 3], the rows of a
        TimestepBuffer, is what the environments returned for ``last.actions``;
        ``act()``: actions [N, action_dim] sampled from the policy;
        ``explore()``: random actions instead.
    """
    actor = actor_optimizer.module

    def observe(timestep: torch.Tensor) -> None:
        last.complete(replay, timestep)

    def act() -> torch.Tensor:
        noise = torch.randn_like(last.actions)
        actions, _ = squash(actor, *actor_optimizer.apply(actor_optimizer.params, last.obs), noise)
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
        mean, _ = actor(torch.as_tensor(obs, dtype=torch.float32))
        return (torch.tanh(mean) * actor.action_scale + actor.action_bias).numpy()

    return policy


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


# The density of a squashed action is a difference of nearly equal numbers where tanh is near 1: no shortcuts there.
EXACT_TANH = {"cpp.use_decompose_tanh": False}


def make_executables(observe: Callable, update: Callable, act: Callable, args: Args, device: torch.device) -> Callable:
    """The function ``advance(timestep_cpu, with_actor) -> actions``, compiled and captured as the flags say.

    It observes, takes an update for each element of ``with_actor`` (whether it trains the actor too), and acts: all as
    one executable for at most one update, in parts for more. ``timestep_cpu`` is pinned where the device is a GPU.
    """
    executable = partial(make_executable, device=device, compile=args.compile, cudagraphs=args.cudagraphs, **EXACT_TANH)

    def step(with_actor: tuple[bool, ...], timestep: torch.Tensor) -> torch.Tensor:
        observe(timestep)
        for flag in with_actor:
            update(flag)
        return act()

    # Each is compiled by its first call, so those that a run does not need cost nothing.
    steps = {with_actor: executable(partial(step, with_actor)) for with_actor in ((), (False,), (True,))}
    just_observe, just_act = executable(observe), executable(act)
    updates = {flag: executable(partial(update, flag)) for flag in (False, True)}

    def advance(timestep_cpu: torch.Tensor, with_actor: tuple[bool, ...]) -> torch.Tensor:
        timestep = timestep_cpu.to(device, non_blocking=True)
        if len(with_actor) <= 1:
            return steps[with_actor](timestep)
        just_observe(timestep)
        for flag in with_actor:
            updates[flag]()
        return just_act()

    return advance


# -------------------------------------------------------------------------------------------------------------- MAIN


@torch.no_grad()
def main(args: Args, make_executables: Callable = make_executables, script_file: str = __file__) -> None:
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
    critics = Critics(obs_dim, action_dim).to(device)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(device)
    actor_optimizer = FlatAdam(actor, lr=args.policy_lr, eps=1e-8)
    q_optimizer = FlatAdam(critics, lr=args.q_lr, eps=1e-8)
    a_optimizer = FlatAdam(temperature, lr=args.q_lr, eps=1e-8)
    critics_target = q_optimizer.params.clone()
    replay = Replay(args.buffer_size, obs_dim, action_dim, device)
    update, losses = make_update(actor_optimizer, q_optimizer, a_optimizer, critics_target, replay, args)
    last = LastStep.allocate(args.num_envs, obs_dim, action_dim, device)
    observe, act, explore = make_acting(actor_optimizer, replay, last)
    advance = make_executables(observe, update, act, args, device)
    episodes = EpisodeStatistics(args.num_envs)
    state = OffPolicyState(
        args,
        replay,
        envs,
        episodes,
        actor=actor,
        critics=critics,
        temperature=temperature,
        actor_optimizer=actor_optimizer,
        q_optimizer=q_optimizer,
        a_optimizer=a_optimizer,
        critics_target=critics_target,
        losses=losses,
        next_actions=last.actions,
    )

    with Run(args, script_file, device, total_steps=args.total_timesteps // args.num_envs * args.num_envs) as run:
        schedule = state.resume(run)

        timestep_buffer = TimestepBuffer(args.num_envs, obs_dim, device)
        with run.warmup():
            touched = [tensor for part in (actor_optimizer, q_optimizer, a_optimizer) for tensor in part.tensors()]
            with untouched([*touched, critics_target, losses, *replay.tensors(), *last], device):
                # A step that only resets is not stored, and there must be a transition to sample.
                timestep_cpu = timestep_buffer.write(0.0, 0.0, 0.0, dones=1.0)
                last.resets.fill_(1.0)
                replay.size.clamp_(min=1)
                for with_actor in schedule.patterns(args.policy_frequency):
                    for _ in range(WARMUP_CALLS if args.compile or args.cudagraphs else 1):
                        advance(timestep_cpu, with_actor)

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
                with_actor = tuple(n % args.policy_frequency == 0 for n in range(first, first + due))
                actions = advance(timestep_cpu, with_actor)

            if run.log_due():
                run.log(named_losses(run, LOSS_NAMES, losses))
            if run.checkpoint_due():
                run.checkpoint(state.state_dict())

        run.finish(state.state_dict(), model={"actor": actor.state_dict()})
    envs.close()


if __name__ == "__main__":
    run_script(main, Args, __file__)
