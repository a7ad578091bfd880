"""The rows of ``leanrl.tools.ablate``: tricks of the fast variants, and how each is switched off.

Unless their flags say otherwise, they use the scripts' default hyperparameters, on HalfCheetah-v5, CartPole-v1 and
Breakout-v5. Run as a module with the number of a row, ``with`` or ``without``, and flags, this file runs that row's
script once.
"""

import importlib
import sys
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import gymnasium as gym
import torch

import leanrl.dqn_torchcompile as dqn
import leanrl.ppo_atari_envpool_torchcompile as atari
import leanrl.ppo_continuous_action as ppo_reference
import leanrl.ppo_continuous_action_torchcompile as ppo
from leanrl.support import devices, executables
from leanrl.support.cli import run_script
from leanrl.support.envs import env_seeds, make_env
from leanrl.support.layers import TwinLinear
from leanrl.support.normalization import RewardNormalizer, RunningMoments

CORES = devices.available_cores()


class Row(NamedTuple):
    """A line of the table: two runs of a script, with and without the trick."""

    group: str
    name: str
    """for --rows; several lines may share it"""
    trick: str
    script: str
    flags: str
    """of both runs"""
    with_flags: str = ""
    without_flags: str = ""
    changes: tuple[AbstractContextManager, ...] = ()
    """patches of unittest.mock that are active in the run without the trick"""
    is_start: bool = False
    """measure the seconds of the warm-up with an empty TorchInductor cache, not the speed"""

    def command(self, side: str) -> list[str]:
        """The command line of the run ``with`` or ``without`` the trick."""
        program = [sys.executable, "-m", "leanrl.tools.ablate_rows", f"{ROWS.index(self)}", side]
        own = self.with_flags if side == "with" else self.without_flags
        return [*program, "--device=cpu", "--checkpoint-every=None", *self.flags.split(), *own.split()]


# ------------------------------------------------------------------------------------------------- WITHOUT THE TRICKS


def with_guards(fn, device: torch.device):
    """Compiles as CompiledStep does, but calls go through ``torch.compile``, which checks guards."""
    return torch.compile(fn, fullgraph=True, dynamic=False, options=executables.CPU_OPTIONS)


def sync_envs(env_id: str, num_envs: int, seed: int, *_, **__) -> gym.vector.VectorEnv:
    next_step = gym.vector.AutoresetMode.NEXT_STEP
    envs = gym.vector.SyncVectorEnv([lambda: make_env(env_id)] * num_envs, autoreset_mode=next_step)
    envs.reset = partial(envs.reset, seed=env_seeds(seed, num_envs))
    return envs


def wrapped_envs(*args, make_envs=ppo.make_envs, **kwargs) -> gym.vector.VectorEnv:
    """Environments normalised by Gymnasium's wrappers, as in the reference."""
    return ppo_reference.wrap_envs(make_envs(*args, **kwargs), gamma=ppo.Args.gamma)[0]


def gae_by_loop(rewards, values, terminations, dones, gamma, gae_lambda) -> torch.Tensor:
    """``compute_gae``, step by step."""
    advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * (1.0 - terminations[t]) - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * (1.0 - dones[t]) * advantage
    return advantages


def two_products(self: TwinLinear, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.addmm(self.bias[i], x[i], self.weight[i]) for i in range(len(x))])


def options(**changes) -> tuple[AbstractContextManager]:
    """TorchInductor's options with ``changes``."""
    return (patch.dict(executables.CPU_OPTIONS, changes),)


GUARDS = patch.object(executables, "CompiledStep", with_guards), patch("torch._dynamo.config.trace_autograd_ops", True)
NO_SUMS, DQN_NO_SUMS = ((patch.object(x, "mlp_as_sums", lambda network, x: network(x)),) for x in (ppo, dqn))
LOOP, ATARI_LOOP = ((patch.object(script, "compute_gae", gae_by_loop),) for script in (ppo, atari))
SYNC = (patch.object(ppo, "make_envs", sync_envs),)
WRAPPERS = (
    patch.object(ppo, "make_envs", wrapped_envs),
    patch.object(ppo, "require_continuous_actions", lambda *_: None),  # ClipAction removes the bounds
    patch.object(RunningMoments, "update", lambda self, batch: None),
    patch.object(RunningMoments, "forward", lambda self, x: x.float()),
    patch.object(RewardNormalizer, "__call__", lambda self, rewards, *_: rewards),
)
ALL_CORES = (patch.object(torch, "set_num_threads", lambda number: None),)
TWO_PRODUCTS = (patch.object(TwinLinear, "forward", two_products),)
MKL = (patch.object(devices, "use_onednn_matmuls", lambda: None),)
GIVEN_BACK = (patch.object(atari, "keep_freed_memory", lambda: None),)


def without_option(name: str) -> tuple[AbstractContextManager]:
    kept = {key: value for key, value in executables.CPU_OPTIONS.items() if key != name}
    return (patch.dict(executables.CPU_OPTIONS, kept, clear=True),)


# --------------------------------------------------------------------------------------------------------------- ROWS

PPO = "ppo", "ppo_continuous_action_torchcompile", "--total-timesteps=40960"
PPO_64 = *PPO[:2], "--num-envs=64 --env-backend=envpool --num-steps=128 --num-minibatches=2 --total-timesteps=65536"
STARTUP = "startup", PPO[1], "--total-timesteps=2048"
TD3 = "td3", "td3_continuous_action_torchcompile", "--learning-starts=1000 --total-timesteps=4000"
SAC = "sac", "sac_continuous_action_torchcompile", "--learning-starts=1000 --total-timesteps=4000"
DQN = "dqn", "dqn_torchcompile", "--total-timesteps=60000"
ATARI = "atari", "ppo_atari_envpool_torchcompile", "--total-timesteps=8192"

BF16 = "--amp=bf16"


def row(of: tuple[str, str, str], name: str, trick: str, *changes, both="--compile", **flags) -> Row:
    group, script, common_flags = of
    return Row(group, name, trick, script, f"{common_flags} {both}", changes=changes, **flags)


ROWS = [
    row(PPO, "update", "compiled, not eager", both="", with_flags="--compile"),
    row(PPO, "direct_call", "graphs called directly", *GUARDS),
    row(PPO, "cpp_wrapper", "kernels called from C++, not Python", *options(cpp_wrapper=False)),
    row(PPO, "size_asserts", "no checks of the inputs' sizes", *options(size_asserts=True)),
    row(PPO, "sums", "policy as sums", *NO_SUMS),
    row(PPO, "environment", "SerialVectorEnv, not SyncVectorEnv", *SYNC),
    row(PPO, "normalization", "normalisation in the compiled step, not in wrappers", *WRAPPERS),
    row(PPO, "gae", "GAE by a scan", *LOOP),
    row(PPO, "threads", f"1 thread, not {CORES}", without_flags=f"--num-threads={CORES}"),
    row(PPO_64, "threads", f"{CORES} threads, not 1, 64 environments", without_flags="--num-threads=1"),
    row(PPO_64, "acting_thread", f"acting on 1 thread, not {CORES}, 64 environments", *ALL_CORES),
    *(
        row(STARTUP, "startup", f"{name} {value}, cold cache", *without_option(name), is_start=True)
        for name, value in executables.CPU_OPTIONS.items()
    ),
    row(STARTUP, "collector", "collector off", patch.object(executables, "collector_off", ExitStack), is_start=True),
    row(TD3, "td3_update", "compiled, not eager", both="", with_flags="--compile"),
    row(TD3, "td3_twins", "twin critics in one product, not two", *TWO_PRODUCTS),
    row(TD3, "td3_threads", f"{CORES} threads, not 1: float32", without_flags="--num-threads=1"),
    row(TD3, "td3_threads", f"{CORES} threads, not 1: bf16", both=f"--compile {BF16}", without_flags="--num-threads=1"),
    row(TD3, "td3_bf16", "--amp bf16, not float32", with_flags=BF16),
    row(TD3, "td3_onednn", "oneDNN's float32 products, not MKL's", *MKL),
    row(SAC, "sac_update", "compiled, not eager", both="", with_flags="--compile"),
    row(SAC, "sac_update", "compiled, not eager, both with --amp bf16", both=BF16, with_flags="--compile"),
    row(DQN, "dqn_update", "compiled, not eager", both="", with_flags="--compile"),
    row(DQN, "dqn_sums", "greedy action as sums", *DQN_NO_SUMS),
    row(ATARI, "atari_update", "compiled, not eager", both="", with_flags="--compile"),
    row(ATARI, "atari_update", "compiled, not eager, both with --amp bf16", both=BF16, with_flags="--compile"),
    row(ATARI, "atari_memory", "freed memory kept", *GIVEN_BACK),
    row(ATARI, "atari_bf16", "--amp bf16, not float32", with_flags=BF16),
    row(ATARI, "atari_gae", "GAE by a scan", *ATARI_LOOP),
    row(ATARI, "atari_groups", "two groups of environments in turn", with_flags="--num-env-groups=2"),
    row(ATARI, "atari_acting_thread", f"acting on 1 thread, not {CORES}", *ALL_CORES),
    row(ATARI, "atari_threads", f"{CORES} threads, not 1", without_flags="--num-threads=1"),
]


def run(row: Row, side: str) -> None:
    """Runs the row's script with the flags of this process's command line."""
    script = importlib.import_module(f"leanrl.{row.script}")
    with ExitStack() as stack:
        for change in row.changes if side == "without" else ():
            stack.enter_context(change)
        run_script(script.main, script.Args, script.__file__)


if __name__ == "__main__":
    number, side = sys.argv[1:3]
    del sys.argv[1:3]
    run(ROWS[int(number)], side)
