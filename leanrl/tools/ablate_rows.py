"""The rows of ``leanrl.tools.ablate``: for each trick, how a thing is done with it and without.

At the scripts' default hyperparameters, on HalfCheetah-v5, CartPole-v1 and Breakout-v5. Rows of Atari and of 64
environments need EnvPool.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from torch.distributions.normal import Normal

import leanrl.dqn_torchcompile as dqn
import leanrl.ppo_atari_envpool as atari_reference
import leanrl.ppo_atari_envpool_torchcompile as atari
import leanrl.ppo_continuous_action as ppo_reference
import leanrl.ppo_continuous_action_torchcompile as ppo
import leanrl.sac_continuous_action as sac_reference
import leanrl.sac_continuous_action_torchcompile as sac
import leanrl.td3_continuous_action as td3_reference
import leanrl.td3_continuous_action_torchcompile as td3
from leanrl.support import devices, executables
from leanrl.support.envs import env_seeds, make_env
from leanrl.support.layers import TwinLinear
from leanrl.support.normalization import RewardNormalizer, RunningMoments
from leanrl.tools.ablation import FUSED, Row, Side, WholeRun, compiled, in_pieces, made

CORES = devices.available_cores()
# Environment steps of a burst of TD3, SAC and DQN, each with an update.
NUM_UPDATES = 20


# ---------------------------------------------------------------------------------------------------------------- PPO


def epoch(script: ModuleType, compiler: Callable = lambda update: update, **flags) -> Side:
    """An epoch of updates, on a rollout whose numbers are as likely as those of the first policy."""
    parts = made(script, **flags)
    rollout = parts.rollout
    for column in rollout:
        column.copy_(torch.randn(column.shape) if column.is_floating_point() else torch.randint(4, column.shape))
    rollout.weights.fill_(1.0)
    rollout.logprobs.fill_(-8.5 if rollout.actions.is_floating_point() else -math.log(4))
    update, inds = compiler(parts.update), torch.randperm(parts.batch_size)
    calls = [partial(update, mb_inds) for mb_inds in inds.split(parts.batch_size // parts.args.num_minibatches)]
    return Side(calls, parts.batch_size / parts.args.update_epochs, parts)


def rollout(noise_by_step: bool = False, then: Callable | None = None) -> Side:
    """The policy steps of PPO's rollout, and ``then(agent, rollout)``."""
    parts = made(ppo)
    torch.set_num_threads(1)
    raw_obs = 1 + 3 * torch.randn(parts.args.num_steps, 1, parts.obs_dim, dtype=torch.float64)
    calls = [parts.row.zero_, (parts.noise[-1] if noise_by_step else parts.noise).normal_]
    for obs, noise in zip(raw_obs, parts.noise, strict=False):
        calls += [*([noise.normal_] if noise_by_step else []), partial(parts.policy_step, obs)]
    calls += [partial(then, parts.agent, parts.rollout)] if then else []
    return Side(calls, len(raw_obs), parts, len(raw_obs))


def make_valuing(*args, make_acting: Callable = ppo.make_acting) -> tuple[Callable, ...]:
    """As ``make_acting``, but a policy step computes values and log-probabilities too."""
    agent, _, rollout, noise, row, *_ = args
    observe, act, _ = make_acting(*args)

    @torch.no_grad()
    def policy_step(raw_obs: torch.Tensor) -> torch.Tensor:
        observe(raw_obs)
        rollout.values[row] = ppo.mlp_as_sums(agent.critic, rollout.obs[row][0])
        rollout.logprobs[row] = (Normal(0.0, 1.0, False).log_prob(noise[row]) - agent.actor_logstd).sum(-1)
        return act()

    return observe, act, policy_step


@torch.no_grad()
def value(agent: ppo.Agent, rollout: ppo.Rollout) -> None:
    """What a step of ``make_valuing`` adds, for all steps at once: the beginning of ``finish_rollout``."""
    rollout.logprobs[:-1] = agent.get_policy(rollout.obs[:-1]).log_prob(rollout.actions[:-1]).sum(-1)
    rollout.values[:-1] = agent.get_value(rollout.obs[:-1])


def playing(wrap: Callable = lambda envs: envs) -> Side:
    """PPO's environment and policy in turn for a rollout, to its normalised rewards. What is played is random."""
    parts = made(ppo)
    torch.set_num_threads(1)
    envs, num_steps = wrap(parts.envs), parts.args.num_steps
    parts.obs_moments.update(torch.from_numpy(envs.reset(seed=env_seeds(1, 1))[0]))
    actions = np.random.default_rng(1).uniform(-1, 1, (num_steps, 1, parts.action_dim)).astype(np.float32)
    rewards, terminations, weights = np.ones((3, num_steps, 1), np.float32)

    def step(t: int) -> torch.Tensor:
        obs, rewards[t], terminations[t], *_ = envs.step(actions[t])
        return parts.policy_step(torch.from_numpy(obs))

    finish = partial(parts.normalize_rewards, *map(torch.from_numpy, (rewards, terminations, weights)))
    return Side([parts.row.zero_, *(partial(step, t) for t in range(num_steps)), finish], num_steps, parts, num_steps)


def sync_envs(env_id: str, *_, **__) -> gym.vector.VectorEnv:
    return gym.vector.SyncVectorEnv([lambda: make_env(env_id)], autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)


def advantages(script: ModuleType) -> Side:
    """Those of a rollout."""
    args = script.Args()
    numbers = torch.rand(3, args.num_steps + 1, args.num_envs, generator=torch.Generator().manual_seed(0))
    values, rewards, dones = numbers[0], numbers[1, 1:], (numbers[2, 1:] > 0.99).float()
    gae = partial(script.compute_gae, rewards, values, dones, dones, args.gamma, args.gae_lambda)
    return Side([gae], dones.numel())


def gae_by_loop(rewards, values, terminations, dones, gamma, gae_lambda) -> torch.Tensor:
    """``compute_gae``, step by step."""
    advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * (1.0 - terminations[t]) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * (1.0 - dones[t]) * advantage
    return advantages


def with_guards(fn: Callable, device: torch.device, cpp_wrapper: bool, **_) -> Callable:
    """As CompiledStep compiles, but called by way of ``torch.compile``, which checks guards."""
    return torch.compile(fn, fullgraph=True, dynamic=False, options=executables.compile_options(device, cpp_wrapper))


def starting(change: str = "", cold: bool = True) -> WholeRun:
    """A run of PPO that is timed until it has compiled, by default with an empty cache."""
    return WholeRun("ppo_continuous_action_torchcompile", 0, "--total-timesteps 2048", change, cold)


def starting_warm() -> WholeRun:
    starting(cold=False).sample()
    return starting(cold=False)


# ---------------------------------------------------------------------------------------------------- TD3, SAC AND DQN


def filled(script: ModuleType, buffer_size: int = 100_000, **flags) -> SimpleNamespace:
    """What a script's ``main`` makes, with a full replay: the same transitions every time, none of them terminal."""
    parts = made(script, buffer_size=buffer_size, **flags)
    rows = torch.randn(buffer_size, parts.replay.rows.shape[1], generator=torch.Generator().manual_seed(0))
    rows[:, 2 * parts.obs_dim : -2].clamp_(0.0, 1.0).round_()  # DQN's actions are numbers
    rows[:, -1] = 0.0
    parts.replay.load_state_dict({"rows": rows, "cursor": torch.zeros(1, dtype=torch.int64)})
    return parts


def updates(script: ModuleType, compiler: Callable = lambda update: update, **flags) -> Side:
    """Those of TD3 or SAC, in turn without and with one of the actor."""
    parts = filled(script, **flags)
    update = partial(parts.update, with_targets=True) if "log_alpha" in vars(parts) else parts.update
    return Side([compiler(partial(update, flag)) for flag in (False, True)] * (NUM_UPDATES // 2), NUM_UPDATES, parts)


def two_products(self: TwinLinear, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.addmm(self.bias[i], x[i], self.weight[i]) for i in range(len(x))])


def decaying(flush: bool = True) -> Side:
    """Updates of SAC where Adam's averages have become denormal: those behind relus that are dead.

    On one thread, since each has a setting of its own, taken over from the one that started it.
    """
    side = updates(sac, exactly, num_threads=1)
    torch.set_flush_denormal(False)
    for network, adam in ((side.parts.actor, side.parts.actor_optimizer), (side.parts.critics, side.parts.q_optimizer)):
        for layer in (network.fc1, network.fc2):
            layer.bias.detach()[..., :26] = -1e3
        torch._foreach_add_([adam.exp_avg, adam.exp_avg_sq], 1e-40)
    torch.set_flush_denormal(True)
    side.calls = [partial(torch.set_flush_denormal, flush), *side.calls, partial(torch.set_flush_denormal, True)]
    return side


def learning(at_once: bool = True) -> Side:
    """DQN's ten environment steps and the update that then is due; transitions are written at once, or one by one."""
    parts = filled(dqn, dqn.Args.buffer_size, updates_per_step=0.1 if at_once else 1.0)
    staging, write = parts.staging, compiled(lambda rows: parts.replay.add(*parts.staging.split(rows)))
    calls = []
    for obs, next_obs in pairwise(torch.randn(11, 1, parts.obs_dim).numpy()):
        add = partial(staging.add, obs, next_obs, 1, 1.0, 0.0, 0.0)
        calls += [add] if at_once else [add, lambda: write(staging.take())]
    calls += [lambda: parts.learn(staging.take())] if at_once else [parts.update]
    return Side(calls * NUM_UPDATES, 10 * NUM_UPDATES, parts, NUM_UPDATES)


def choosing() -> Side:
    """DQN's greedy actions."""
    parts = made(dqn)
    return Side([partial(parts.best, obs) for obs in torch.randn(100, 1, parts.obs_dim).numpy()], 100, parts)


# --------------------------------------------------------------------------------------------------------------- ROWS

NO_SUMS, DQN_NO_SUMS = (patch.object(x, "mlp_as_sums", lambda network, x: network(x)) for x in (ppo, dqn))
LOOP, ATARI_LOOP = (patch.object(script, "compute_gae", gae_by_loop) for script in (ppo, atari))
# Executed in a new process, before the run.
ON_CORES = f"import torch; torch.set_num_threads({CORES}); torch.set_num_threads = lambda _: None"

epoch_1, epoch_64 = partial(epoch, ppo), partial(epoch, ppo, num_envs=64)
epoch_eager, epoch_pieces = partial(epoch, ppo_reference), partial(epoch, ppo_reference, in_pieces)
wrapped = partial(playing, partial(ppo_reference.wrap_envs, gamma=ppo.Args.gamma))
gae, atari_gae = partial(advantages, ppo), partial(advantages, atari)
flags_64 = "--num-envs 64 --env-backend envpool --num-steps 128 --num-minibatches 2 --total-timesteps 32768"
run_64 = partial(WholeRun, "ppo_continuous_action_torchcompile", 32_768, flags_64)

GUARDS = patch.object(executables, "CompiledStep", with_guards), patch("torch._dynamo.config.trace_autograd_ops", True)
WRAPPED, UNWRAPPED = (patch.dict(executables.CPU_OPTIONS, cpp_wrapper=value) for value in (True, False))
SIZE_ASSERTS = patch.dict(executables.CPU_OPTIONS, size_asserts=True)
SLEEF = patch.dict(executables.CPU_OPTIONS, {"cpp.use_decompose_tanh": False})
SYNC, BY_STEP = patch.object(ppo, "make_envs", sync_envs), patch.object(ppo, "make_acting", make_valuing)
NORMALIZED = (
    patch.object(RunningMoments, "update", lambda self, batch: None),
    patch.object(RunningMoments, "normalize", lambda self, x: x.float()),
    patch.object(RewardNormalizer, "__call__", lambda self, rewards, *_: rewards),
)

PPO = [
    Row("update", "update compiled as one graph", epoch_1, epoch_eager),
    Row("update", "one graph, not .backward() and Adam(fused)", epoch_1, epoch_pieces, FUSED),
    Row("direct_call", "graph called directly: policy step", rollout, rollout, *GUARDS),
    Row("direct_call", "graph called directly: update", epoch_1, epoch_1, *GUARDS),
    Row("cpp_wrapper", "Python's wrapper, not C++'s: policy step", rollout, rollout, WRAPPED),
    Row("cpp_wrapper", "cpp_wrapper: update", epoch_1, epoch_1, UNWRAPPED),
    Row("size_asserts", "no checks of the inputs' sizes: update", epoch_1, epoch_1, SIZE_ASSERTS),
    Row("tanh", "decomposed tanh: update", epoch_1, epoch_1, SLEEF),
    Row("tanh", "decomposed tanh: update, 64 environments", epoch_64, epoch_64, SLEEF),
    Row("sums", "policy as sums", rollout, rollout, NO_SUMS),
    Row("deferred", "values and log-probabilities in one batch", partial(rollout, then=value), rollout, BY_STEP),
    Row("environment", "SerialVectorEnv, not SyncVectorEnv", playing, playing, SYNC),
    Row("normalization", "normalisation in the compiled step, not in wrappers", playing, wrapped, *NORMALIZED),
    Row("gae", "GAE by a scan", gae, gae, LOOP),
    Row("threads", f"1 thread, not {CORES}: update", epoch_1, partial(epoch_1, num_threads=CORES)),
    Row("threads", f"{CORES} threads, not 1: update, 64 environments", epoch_64, partial(epoch_64, num_threads=1)),
    Row("acting_thread", f"64 environments: acting on 1 thread, not {CORES}", run_64, partial(run_64, ON_CORES)),
    Row("noise", "noise drawn once per rollout", rollout, partial(rollout, noise_by_step=True), tolerance=math.inf),
]

OPTIONS = "from leanrl.support.executables import CPU_OPTIONS as options; options"
STARTS = {f"{name} {value}": f".pop({name!r})" for name, value in executables.CPU_OPTIONS.items() if "tanh" not in name}
STARTS["cpp_wrapper: update"] = "['cpp_wrapper'] = False"

STARTUP = [
    Row("startup", f"{trick}, cold cache", starting, partial(starting, OPTIONS + change))
    for trick, change in STARTS.items()
]
STARTUP += [Row("startup", "warm cache", starting_warm, starting)]

exactly = partial(compiled, **sac.EXACT_TANH)
td3_, td3_bf16 = partial(updates, td3, compiled), partial(updates, td3, compiled, amp="bf16")
td3_eager, td3_pieces = partial(updates, td3_reference), partial(updates, td3_reference, in_pieces)
sac_, sac_bf16 = partial(updates, sac, exactly), partial(updates, sac, exactly, amp="bf16")
sac_eager, sac_eager_bf16 = partial(updates, sac_reference), partial(updates, sac_reference, amp="bf16")

TWO_PRODUCTS = patch.object(TwinLinear, "forward", two_products)
MKL = patch.object(devices, "use_onednn_products", lambda: None)

TD3 = [
    Row("td3_update", "update compiled, not eager", td3_, td3_eager),
    Row("td3_one_graph", "one graph, not .backward() and Adam(fused)", td3_, td3_pieces, FUSED),
    Row("td3_twins", "twin critics in one product, not two", td3_, td3_, TWO_PRODUCTS),
    Row("td3_threads", f"{CORES} threads, not 1: float32", td3_, partial(td3_, num_threads=1)),
    Row("td3_threads", f"{CORES} threads, not 1: bf16", td3_bf16, partial(td3_bf16, num_threads=1)),
    Row("td3_bf16", "--amp bf16, not float32", td3_bf16, td3_),
    Row("td3_onednn", "oneDNN's float32 products, not MKL's", td3_, td3_, MKL),
]

SAC = [
    Row("sac_update", "update compiled, not eager", sac_, sac_eager),
    Row("sac_update", "update compiled, not eager, both with --amp bf16", sac_bf16, sac_eager_bf16),
    Row("sac_denormals", "denormal numbers count as 0, a tenth of the units dead", decaying, partial(decaying, False)),
]

DQN = [
    Row("dqn_staging", "transitions written ten at a time, with the update", learning, partial(learning, False)),
    Row("dqn_sums", "greedy action as sums", choosing, choosing, DQN_NO_SUMS),
]

atari_, atari_bf16 = partial(epoch, atari, compiled), partial(epoch, atari, compiled, amp="bf16")
atari_eager, atari_eager_bf16 = partial(epoch, atari_reference), partial(epoch, atari_reference, amp="bf16")
atari_pieces, atari_thread = partial(atari_eager, in_pieces), partial(atari_, num_threads=1)
atari_run = partial(WholeRun, "ppo_atari_envpool_torchcompile", 4096, "--total-timesteps 4096")
atari_given_back = partial(atari_run, "script.keep_freed_memory = lambda: None")

# A relu that is open on one side and closed on the other, for rounding, shows in what Adam makes of it.
ATARI = [
    Row("atari_update", "the update compiled, not the reference's", atari_, atari_eager, tolerance=1e-2),
    Row("atari_one_graph", "one graph, not .backward() and Adam(fused)", atari_, atari_pieces, FUSED, tolerance=1e-2),
    Row("atari_memory", "freed memory kept: training, float32", atari_run, atari_given_back),
    Row("atari_bf16", "--amp bf16, not float32: update", atari_bf16, atari_),
    Row("atari_bf16", "--amp bf16: the update compiled, not the reference's", atari_bf16, atari_eager_bf16),
    Row("atari_gae", "GAE by a scan", atari_gae, atari_gae, ATARI_LOOP),
    Row("atari_update_threads", f"update on {CORES} threads, not 1", atari_, atari_thread, tolerance=1e-2),
]
