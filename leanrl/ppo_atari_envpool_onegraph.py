"""Proximal Policy Optimization (PPO) on Atari games over EnvPool, with one CUDA graph to act and one for an epoch.

Network, losses, update, acting and loop are those of ppo_atari_envpool_torchcompile.py; only what is captured differs.
With ``--cudagraphs`` all that is done between two steps of the environments is one replay, from the frames in pinned
memory to the actions in pinned memory, and an epoch of minibatches is another (leanrl/support/onegraph.py). With
``--compile`` their kernels are compiled, without it they are PyTorch's own. Without ``--cudagraphs``, on a CPU say,
this is its sibling.

    python leanrl/ppo_atari_envpool_onegraph.py --compile --cudagraphs --amp bf16      # on a CUDA device
    python leanrl/ppo_atari_envpool_onegraph.py --compile                              # as the sibling

One graph acts for all steps of a rollout, and reads on the device which row of the rollout is its own: a graph per step
would save it one number read and one counted up, and take num_steps + 1 captures and as many graphs' memory. Epochs are
graphs by themselves, so that --target-kl can stop between them; their permutations are drawn outside, as the sibling's.

Not yet run on a GPU: doc/benchmarks/gpu.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import leanrl.ppo_atari_envpool_torchcompile as sibling
from leanrl.support.cli import run_script
from leanrl.support.executables import CompiledStep
from leanrl.support.onegraph import Captured, pinned_like
from leanrl.support.run import synchronize


@dataclass
class Args(sibling.Args):
    cudagraphs: bool = False
    """replay a step's acting, its copies included, as one CUDA graph, and an epoch of the update as another"""


PROTOCOL = sibling.PROTOCOL
validate = sibling.validate
load_policy = sibling.load_policy  # plays the models that this script saves


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


class Act:
    """The function ``act(obs) -> actions`` of NumPy's arrays, all between them one graph."""

    def __init__(self, policy_step: Callable, device: torch.device) -> None:
        self._policy_step = policy_step
        self._device = device
        self._graph = Captured(self._step, torch.cuda.Stream(device))
        self._obs_cpu: torch.Tensor | None = None
        self._obs: torch.Tensor | None = None
        self._actions_cpu: torch.Tensor | None = None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        if self._obs_cpu is None:
            self._obs_cpu = pinned_like(torch.from_numpy(obs))
            self._obs = self._obs_cpu.to(self._device)
        # EnvPool's arrays are new at each step. The copy of the last ones is done: the actions were waited for.
        self._obs_cpu.numpy()[:] = obs
        self._graph()
        synchronize(self._device)
        return self._actions_cpu.numpy().copy()

    def _step(self) -> None:
        self._obs.copy_(self._obs_cpu, non_blocking=True)
        actions = self._policy_step(self._obs)
        if self._actions_cpu is None:
            self._actions_cpu = pinned_like(actions)
        self._actions_cpu.copy_(actions, non_blocking=True)


def make_executables(policy_step: Callable, update: Callable, args: Args, device: torch.device) -> tuple[Callable, ...]:
    """As its sibling's, ``act(obs) -> actions`` and ``train_epoch(b_inds) -> parts``."""
    if not args.cudagraphs:
        return sibling.make_executables(policy_step, update, args, device)
    if args.compile:
        policy_step, update = CompiledStep(policy_step, device), CompiledStep(update, device)
    inds = torch.zeros(args.num_envs * args.num_steps, dtype=torch.int64, device=device)
    epoch = Captured(partial(sibling.each_minibatch, update, args, inds), torch.cuda.Stream(device))

    def train_epoch(b_inds: torch.Tensor) -> torch.Tensor:
        inds.copy_(b_inds)
        return epoch()

    return Act(policy_step, device), train_epoch


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    sibling.main(args, make_executables, __file__)


if __name__ == "__main__":
    run_script(main, Args, __file__)
