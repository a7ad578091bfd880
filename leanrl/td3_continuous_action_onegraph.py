"""Twin Delayed Deep Deterministic policy gradient (TD3) with one CUDA graph for a whole step.

Networks, losses, update, acting and loop are those of td3_continuous_action_torchcompile.py; only what is captured
differs: with ``--cudagraphs`` everything between two steps of the environments, the copies in and out included, is one
graph (leanrl/support/onegraph.py). With ``--compile`` its kernels are compiled, without it they are PyTorch's own.
Without ``--cudagraphs``, on a CPU say, this is its sibling.

    python leanrl/td3_continuous_action_onegraph.py --compile --cudagraphs      # on a CUDA device
    python leanrl/td3_continuous_action_onegraph.py --compile                   # as the sibling

Not yet run on a GPU: doc/benchmarks/gpu.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import leanrl.td3_continuous_action_torchcompile as sibling
from leanrl.support.cli import run_script
from leanrl.support.executables import CompiledStep
from leanrl.support.onegraph import OneGraph


@dataclass
class Args(sibling.Args):
    cudagraphs: bool = False
    """replay all that happens between two steps of the environments as one CUDA graph"""


validate = sibling.validate
load_policy = sibling.load_policy  # plays the models that this script saves


# ------------------------------------------------------------------------------------------------------- EXECUTABLES


def make_executables(observe: Callable, update: Callable, act: Callable, args: Args, device: torch.device) -> Callable:
    """As its sibling's, ``advance(timestep_cpu, with_actor) -> actions``; any number of updates is one graph."""
    if not args.cudagraphs:
        return sibling.make_executables(observe, update, act, args, device)

    def executable(fn: Callable) -> Callable:
        return CompiledStep(fn, device) if args.compile else fn

    updates = {flag: executable(partial(update, flag)) for flag in (False, True)}
    return OneGraph(executable(observe), updates, executable(act), device)


# -------------------------------------------------------------------------------------------------------------- MAIN


def main(args: Args) -> None:
    sibling.main(args, make_executables, __file__)


if __name__ == "__main__":
    run_script(main, Args, __file__)
