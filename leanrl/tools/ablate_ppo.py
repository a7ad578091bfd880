"""What each trick of the fast PPO for continuous actions is worth: rows of ``leanrl.tools.ablate``.

At the default hyperparameters, with HalfCheetah-v5's sizes; the two sides of a pair must give the same numbers over a
rollout (2,048 steps and the like) or an epoch of updates (32).
"""

import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

import leanrl.ppo_continuous_action as reference
import leanrl.ppo_continuous_action_torchcompile as fast
from leanrl.support.devices import available_cores, update_threads
from leanrl.support.envs import env_seeds, make_env, make_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.executables import CPU_OPTIONS, CompiledStep, compile_options
from leanrl.support.normalization import RewardNormalizer, RunningMoments
from leanrl.support.optim import Adam
from leanrl.tools.ablation import CPU, Compiler, Group, Pair, Side, eager, in_pieces, pair, printed_by_process

ENV_ID, OBS_DIM, ACTION_DIM = "HalfCheetah-v5", 17, 6
NUM_STEPS = fast.Args.num_steps


# -------------------------------------------------------------------------------------------------------------- SIDES


class Parts:
    """What the fast variant's ``main`` makes before its loop, and a finished rollout; the same numbers every time."""

    def __init__(self, num_envs: int = 1, as_sums: bool = True) -> None:
        self.args = args = fast.Args(num_envs=num_envs)
        self.batch_size = num_envs * NUM_STEPS
        shape, minibatch_size = (NUM_STEPS, num_envs), self.batch_size // args.num_minibatches
        self.num_threads = update_threads(None, minibatch_size)
        with torch.no_grad(), torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.agent = fast.Agent(OBS_DIM, ACTION_DIM)
            self.optimizer = Adam(self.agent.parameters(), lr=args.learning_rate, eps=1e-5)
            self.rollout = rollout = fast.Rollout.allocate(*shape, OBS_DIM, ACTION_DIM, CPU)
            self.noise, self.row = torch.randn_like(rollout.actions), torch.zeros(1, dtype=torch.int64)
            self.moments = RunningMoments.start((OBS_DIM,), CPU)
            self.normalize_rewards = RewardNormalizer(num_envs, args.gamma, CPU)
            high = np.ones(ACTION_DIM, np.float32)
            policy = self.agent, self.moments, rollout, self.noise, self.row, -high, high, as_sums and num_envs == 1
            self.observe, self.act, self.policy_step = fast.make_acting(*policy)
            self.update = fast.make_update(self.agent, self.optimizer, rollout, args)
            self.raw_obs = list(1 + 3 * torch.randn(*shape, OBS_DIM, dtype=torch.float64))
            rollout.obs.normal_()
            rollout.actions.copy_(self.agent.actor_mean(rollout.obs) + self.noise)
            terminations, truncations = (torch.rand(2, *shape) < 0.001).float()
            dones = torch.maximum(terminations, truncations)
            # What environments would have returned: rewards, terminations, dones, resets.
            self.outcome = torch.randn(shape), terminations, dones, torch.cat([torch.zeros(1, num_envs), dones[:-1]])
            self.finish()
            self.minibatches = torch.randperm(self.batch_size).split(minibatch_size)

    def finish(self) -> None:
        """The end of a rollout."""
        fast.finish_rollout(self.agent, self.rollout, self.normalize_rewards, *self.outcome, self.args)


def as_policy(fn: Callable) -> Callable:
    """Compiled as the fast variant compiles its policy step."""
    return fast.make_executables(fn, fn, fast.Args(compile=True), CPU)[0]


def as_update(fn: Callable) -> Callable:
    """Compiled as the fast variant compiles its update."""
    return fast.make_executables(fn, fn, fast.Args(compile=True), CPU)[1]


def wrapped(fn: Callable) -> Callable:
    return CompiledStep(fn, CPU, cpp_wrapper=True)


def unwrapped(fn: Callable) -> Callable:
    return CompiledStep(fn, CPU, cpp_wrapper=False)


def plainly_compiled(cpp_wrapper: bool) -> Compiler:
    torch._dynamo.config.trace_autograd_ops = True  # for good: to patch it at each call would be timed
    return torch.compile(fullgraph=True, dynamic=False, options=compile_options(CPU, cpp_wrapper))


def as_update_with(option: str, value: bool) -> Compiler:
    def compiler(fn: Callable) -> Callable:
        with patch.dict(CPU_OPTIONS, {option: value}):
            return as_update(fn)  # which reads the options now

    return compiler


as_update_with_sleef = as_update_with("cpp.use_decompose_tanh", False)


def updating(
    compiler: Compiler = as_update,
    num_envs: int = 1,
    num_threads: int | None = None,
    optimizer_class: Callable | None = None,
) -> Side:
    """An epoch of updates, one for every minibatch, by the script's optimiser or by another."""
    parts = Parts(num_envs)
    agent, optimizer, update = parts.agent, parts.optimizer, parts.update
    if optimizer_class is not None:
        optimizer = optimizer_class(agent.parameters(), lr=parts.args.learning_rate, eps=1e-5)
        update = reference.make_update(agent, optimizer, parts.rollout, parts.args)
    step = compiler(update)
    start = parameters_to_vector(agent.parameters()).detach()

    @torch.enable_grad()
    def burst():
        for mb_inds in parts.minibatches:
            losses = step(mb_inds)
        return parameters_to_vector(agent.parameters()).detach() - start, losses

    steps, touched = parts.batch_size / parts.args.update_epochs, [agent.state_dict(), optimizer.state_dict()]
    return Side(burst, steps, len(parts.minibatches), touched, num_threads or parts.num_threads)


def acting(
    compiler: Compiler = as_policy,
    parts: Parts | None = None,
    step: Callable | None = None,
    start: Callable = lambda: None,
    finish: Callable = lambda: None,
) -> Side:
    """The policy steps of one rollout, or ``step(raw_obs)`` in their place, between ``start()`` and ``finish()``."""
    parts = parts or Parts()
    rollout, rewards = parts.rollout, parts.normalize_rewards
    step = compiler(step or parts.policy_step)
    filled = [rollout.obs, rollout.values, rollout.logprobs[:-1], rollout.advantages, rollout.returns]

    def burst():
        parts.row.zero_()
        start()
        for raw_obs in parts.raw_obs:
            step(raw_obs)
        finish()
        # The deviation is still 1, so that this is the mean, whatever the noise.
        return (rollout.actions - parts.noise)[:-1], *filled

    moments = [parts.moments.state_dict(), rewards.moments.state_dict(), rewards.discounted]
    touched = [*filled, *moments, rollout.actions, parts.noise, parts.row]
    return Side(burst, NUM_STEPS, calls=NUM_STEPS, touched=touched)


# --------------------------------------------------------------------------------------------------------------- ROWS

PPO = Group(
    f"PPO for continuous actions, {ENV_ID}",
    "An update is one minibatch, of 64 rows (4,096 with 64 environments), GAE is one rollout, all else is one\n"
    "environment step.",
)
STARTUP = Group(f"PPO for continuous actions, {ENV_ID}: compiling when a run starts")


@PPO.row
def update():
    plain = updating(eager, optimizer_class=torch.optim.Adam)
    yield pair("update compiled as one graph", plain, updating())
    fused = partial(torch.optim.Adam, fused=True)
    yield pair("one graph, not .backward() and Adam(fused)", updating(in_pieces, optimizer_class=fused), updating())


@PPO.row
def direct_call():
    yield pair("graph called directly: policy step", acting(plainly_compiled(cpp_wrapper=False)), acting(unwrapped))
    yield pair("graph called directly: update", updating(plainly_compiled(cpp_wrapper=True)), updating(wrapped))


@PPO.row
def cpp_wrapper():
    yield pair("Python's wrapper, not C++'s: policy step", acting(wrapped), acting(unwrapped))
    yield pair("cpp_wrapper: update", updating(unwrapped), updating(wrapped))


@PPO.row
def size_asserts():
    yield pair("no checks of the inputs' sizes: update", updating(as_update_with("size_asserts", True)), updating())


@STARTUP.row
def startup():
    changes = {f"{name} {value}": f"option={name!r}" for name, value in CPU_OPTIONS.items() if "tanh" not in name}
    changes |= {
        "Python's wrapper, not C++'s: policy step": "policy=rows.wrapped",
        "cpp_wrapper: update": "update=rows.unwrapped",
    }
    for trick, change in changes.items():
        yield Pair(f"{trick}, cold cache", lambda change=change: first_calls(change), first_calls)
    for option, value in {"compile_threads": 1, "cpp_cache_precompile_headers": False}.items():
        trick = f"not used: {option} {value}, cold cache"
        yield Pair(trick, first_calls, lambda change=f"{option}={value}": first_calls(change))
    with tempfile.TemporaryDirectory() as cache:
        first_calls(cache=cache)
        yield Pair("warm cache", first_calls, lambda: first_calls(cache=cache))


def first_calls(change: str = "", cache: str | None = None) -> float:
    """Seconds that the first policy step and update take in a new process, by default with an empty cache."""
    return printed_by_process(__name__, f"time_first_calls({change})", cache)


def time_first_calls(
    option: str | None = None, policy: Compiler = as_policy, update: Compiler = as_update, **added
) -> None:
    """What ``first_calls`` runs; prints the seconds. ``option`` is left out, ``added`` are set."""
    CPU_OPTIONS.pop(option, None)
    CPU_OPTIONS.update(added)
    torch.set_num_threads(1)
    parts = Parts()
    policy_step, update = policy(parts.policy_step), update(parts.update)
    print(timeit.timeit(lambda: (policy_step(parts.raw_obs[0]), update(parts.minibatches[0])), number=1))


@PPO.row
def tanh():
    x = torch.linspace(-9, 9, 2**20)
    exact = torch.tanh(x.double())
    facts = []
    for name, compiler in (("decomposed", as_update), ("SLEEF", as_update_with_sleef)):
        error = (compiler(lambda x: torch.tanh(x))(x) - exact).abs()
        facts.append(f"{name}: absolute {error.max():.1e}, relative {(error / exact.abs()).max():.1e}")
    facts = f"Largest errors of float32 tanh over [-9, 9]: {'; '.join(facts)}."
    yield pair("decomposed tanh: update", updating(as_update_with_sleef), updating(), facts)
    sleef = updating(as_update_with_sleef, num_envs=64)
    yield pair("decomposed tanh: update, 64 environments", sleef, updating(num_envs=64))


@PPO.row
def sums():
    yield pair("policy as sums", acting(parts=Parts(as_sums=False)), acting())


@PPO.row
def deferred():
    """The deferred side does all of the rollout's end in one batch; the other one what is left to do there."""
    parts, late = Parts(), Parts()
    rollout, agent, args = parts.rollout, parts.agent, parts.args

    def step(raw_obs: torch.Tensor) -> torch.Tensor:
        parts.observe(raw_obs)
        obs = rollout.obs.index_select(0, parts.row).squeeze(0)
        mean = fast.mlp_as_sums(agent.actor_mean, obs)
        value = fast.mlp_as_sums(agent.critic, obs).squeeze(-1)
        std = agent.actor_logstd.exp()
        action = mean + std * parts.noise.index_select(0, parts.row).squeeze(0)
        logprob = torch.distributions.Normal(mean, std, validate_args=False).log_prob(action).sum(1)
        rollout.values.index_copy_(0, parts.row, value.unsqueeze(0))
        rollout.logprobs.index_copy_(0, parts.row, logprob.unsqueeze(0))
        return parts.act()

    def finish() -> None:
        rewards, terminations, dones, resets = parts.outcome
        rollout.weights[:-1] = 1.0 - resets
        rewards = parts.normalize_rewards(rewards, terminations, rollout.weights[:-1])
        rollout.values[-1] = agent.get_value(rollout.obs[-1])
        advantages = fast.compute_gae(rewards, rollout.values, terminations, dones, args.gamma, args.gae_lambda)
        rollout.advantages[:-1] = advantages
        rollout.returns[:-1] = advantages + rollout.values[:-1]

    by_step, at_once = acting(parts=parts, step=step, finish=finish), acting(parts=late, finish=late.finish)
    yield pair("values and log-probabilities in one batch", by_step, at_once)


def random_actions() -> list[np.ndarray]:
    """For every step of a rollout, in which HalfCheetah passes a truncation (after 1,000 steps)."""
    return list(np.random.default_rng(1).uniform(-1, 1, (NUM_STEPS, 1, ACTION_DIM)).astype(np.float32))


@PPO.row
def environment():
    mode = gym.vector.AutoresetMode.NEXT_STEP
    sync = gym.vector.SyncVectorEnv([lambda: make_env(ENV_ID)], autoreset_mode=mode)

    def stepping(envs: gym.vector.VectorEnv) -> Side:
        envs, actions = reference.wrap_envs(envs, fast.Args.gamma), random_actions()
        envs.reset(seed=env_seeds(1, 1))

        def burst():
            outcomes = [envs.step(action)[:4] for action in actions]
            return [torch.from_numpy(np.stack(x)).double() for x in zip(*outcomes, strict=True)]

        return Side(burst, NUM_STEPS, calls=NUM_STEPS)

    yield pair("SerialVectorEnv, not SyncVectorEnv", stepping(sync), stepping(make_envs(ENV_ID, 1, 1)))


@PPO.row
def normalization():
    """An environment and the compiled policy; the actions played are random ones, so that all sides see the same."""
    actions = random_actions()

    def with_wrappers() -> Side:
        parts, envs, rewards = Parts(), make_envs(ENV_ID, 1, 1), np.zeros((NUM_STEPS, 1))
        envs, rollout = reference.wrap_envs(envs, parts.args.gamma), parts.rollout
        envs.reset()

        def write_and_act(obs: torch.Tensor) -> torch.Tensor:
            rollout.obs.index_copy_(0, parts.row, obs.unsqueeze(0))
            return parts.act()

        step = as_policy(write_and_act)

        def burst():
            parts.row.zero_()
            for t, action in enumerate(actions):
                obs, rewards[t], *_ = envs.step(action)
                step(torch.as_tensor(obs, dtype=torch.float32))
            return rollout.obs, rollout.actions, torch.from_numpy(rewards).float()

        return Side(burst, NUM_STEPS, calls=NUM_STEPS)

    def inside() -> Side:
        parts, envs, episodes = Parts(), make_envs(ENV_ID, 1, 1), EpisodeStatistics(1)
        normalize_rewards = RewardNormalizer(1, parts.args.gamma, CPU)
        rewards, (terminations, dones) = np.zeros((NUM_STEPS, 1)), np.zeros((2, NUM_STEPS, 1), bool)
        parts.moments.update(torch.from_numpy(envs.reset()[0]))
        rollout, policy_step = parts.rollout, as_policy(parts.policy_step)

        def burst():
            parts.row.zero_()
            for t, action in enumerate(actions):
                obs, rewards[t], terminations[t], truncated, _ = envs.step(action)
                dones[t] = terminations[t] | truncated
                policy_step(torch.from_numpy(obs))
            resets = np.concatenate([np.zeros_like(dones[:1]), dones[:-1]])
            episodes.add(rewards, dones, resets)
            outcome = (torch.from_numpy(x).float() for x in (rewards, terminations, ~resets))
            return rollout.obs, rollout.actions, normalize_rewards(*outcome)

        return Side(burst, NUM_STEPS, calls=NUM_STEPS)

    yield pair("normalisation in the compiled step, not in wrappers", with_wrappers(), inside())


@PPO.row
def gae():
    parts = Parts()
    rewards, terminations, dones, _ = parts.outcome

    def loop(rewards, values, terminations, dones, gamma, gae_lambda) -> torch.Tensor:
        advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + gamma * values[t + 1] * (1.0 - terminations[t]) - values[t]
            advantages[t] = advantage = delta + gamma * gae_lambda * (1.0 - dones[t]) * advantage
        return advantages

    inputs = rewards, parts.rollout.values, terminations, dones, parts.args.gamma, parts.args.gae_lambda
    by_loop, by_scan = (Side(lambda fn=fn: [fn(*inputs)], NUM_STEPS) for fn in (loop, fast.compute_gae))
    yield pair("GAE by a scan", by_loop, by_scan)


@PPO.row
def threads():
    cores = available_cores()
    yield pair(f"1 thread, not {cores}: update", updating(num_threads=cores), updating(num_threads=1))
    many = updating(num_envs=64, num_threads=cores)
    yield pair(f"{cores} threads, not 1: update, 64 environments", updating(num_envs=64, num_threads=1), many)


@PPO.row
def acting_thread():
    """EnvPool's threads and PyTorch's share the cores. Needs EnvPool."""
    cores, num_envs = available_cores(), 64
    actions = list(np.random.default_rng(1).uniform(-1, 1, (128, num_envs, ACTION_DIM)).astype(np.float32))

    def playing(num_threads: int) -> Side:
        parts, envs = Parts(num_envs), make_envs(ENV_ID, num_envs, 1, "envpool")
        policy_step = as_policy(parts.policy_step)
        envs.reset()

        def burst():
            parts.row.zero_()
            for action in actions:
                policy_step(torch.from_numpy(envs.step(action)[0]))
            return (parts.rollout.obs,)

        return Side(burst, len(actions) * num_envs, calls=len(actions), num_threads=num_threads)

    yield pair(f"64 environments: acting on 1 thread, not {cores}", playing(cores), playing(1))


@PPO.row
def noise():
    by_step, at_once = Parts(), Parts()

    def write_and_act(raw_obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        by_step.noise.index_copy_(0, by_step.row, noise.unsqueeze(0))
        return by_step.policy_step(raw_obs)

    step = as_policy(write_and_act)
    yield pair(
        "noise drawn once per rollout",
        acting(eager, by_step, step=lambda raw_obs: step(raw_obs, torch.randn(1, ACTION_DIM))),
        acting(parts=at_once, start=at_once.noise.normal_),
    )
