"""What the rows of TD3, SAC and DQN share: parts of ``leanrl.tools.ablate``."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from leanrl.support.devices import available_cores
from leanrl.support.optim import FlatAdam
from leanrl.support.replay import Replay
from leanrl.tools.ablation import CPU, Compiler, Side, eager, pair

ENV_ID, OBS_DIM, ACTION_DIM = "HalfCheetah-v5", 17, 6
HIGH = np.ones(ACTION_DIM, np.float32)
ACTOR_SIZES, CRITICS_SIZES = (OBS_DIM, -HIGH, HIGH), (OBS_DIM, ACTION_DIM)
NUM_FILLED = 100_000
# Updates in a burst; every second trains the actor too.
NUM_UPDATES = 20
PATTERN = (False, True) * (NUM_UPDATES // 2)
# Of the way that the parameters have gone: where a gradient is nearly 0, Adam takes a whole step by its sign.
WAY_TOLERANCE = 1e-3
BF16_TOLERANCE = 0.5
LEGEND = (
    "Each is one environment step, with an update of the critics and every second time one of the actor; "
    f"{available_cores()} threads\nwhere a row does not say."
)


def filled_replay(capacity: int = NUM_FILLED, replay_type: type[Replay] = Replay) -> Replay:
    """Full of the same transitions every time."""
    replay = replay_type(capacity, OBS_DIM, ACTION_DIM, CPU)
    rows = torch.randn(capacity, replay.rows.shape[1], generator=torch.Generator().manual_seed(0))
    rows[:, 2 * OBS_DIM : -2].clamp_(-1.0, 1.0)
    rows[:, -1] = 0.0  # no terminations
    replay.load_state_dict({"rows": rows, "cursor": torch.zeros(1, dtype=torch.int64)})
    return replay


@dataclass
class Learner:
    """One rung's update of TD3 or SAC."""

    update: Callable[[bool], None]
    """trains on one batch; the flag says whether the actor too"""
    results: Sequence[torch.Tensor]
    """to compare beside the parameters"""
    networks: Sequence[dict[str, torch.Tensor]]
    """the parameters by name"""
    touched: Sequence[torch.Tensor]
    with_grad: bool = False
    """whether it uses autograd's ``.backward()``"""
    compiler: Compiler = eager
    """the fast rung's"""


def in_fast_order(named: dict[str, torch.Tensor]) -> torch.Tensor:
    """A network's parameters as one vector in the fast rung's order, where twins and heads may be separate."""
    parts = []
    for name, tensor in named.items():
        if name.startswith("qf1."):
            twins = torch.stack([tensor, named[f"qf2{name[3:]}"]])
            parts.append(twins.mT if twins.dim() == 3 else twins)
        elif name.startswith("fc_mean."):
            parts.append(torch.cat([tensor, named[f"fc_logstd{name[7:]}"]]))
        elif not name.startswith(("qf2.", "fc_logstd.")):
            parts.append(tensor)
    return torch.cat([part.detach().reshape(-1) for part in parts])


def bursts(learner: Learner, step: Callable[[bool], None], num_threads: int | None = None) -> Side:
    """``step(with_actor)`` NUM_UPDATES times, which moves the learner's parameters; by default on all cores."""
    starts = [in_fast_order(named) for named in learner.networks]
    # A burst's samples are its own, so that they are not in the cache from the one before.
    seeds = itertools.count()

    def results():
        yield from learner.results
        for named, start in zip(learner.networks, starts, strict=True):
            yield in_fast_order(named) - start

    def burst():
        torch.default_generator.manual_seed(next(seeds))
        with torch.set_grad_enabled(learner.with_grad):
            for with_actor in PATTERN:
                step(with_actor)
        return results()

    return Side(burst, NUM_UPDATES, NUM_UPDATES, learner.touched, num_threads or available_cores())


def updating(learner: Learner, compiler: Compiler | None = None, num_threads: int | None = None) -> Side:
    """A burst of updates, by default compiled as the fast rungs'."""
    steps = {flag: (compiler or learner.compiler)(partial(learner.update, flag)) for flag in (False, True)}
    return bursts(learner, lambda with_actor: steps[with_actor](), num_threads)


same_way = partial(pair, tolerance=WAY_TOLERANCE)
roughly = partial(pair, tolerance=BF16_TOLERANCE)


def around(side: Side, context: Callable) -> Side:
    """``side`` with its bursts in ``context()``."""
    burst = side.burst

    def surrounded():
        with context():
            return burst()

    side.burst = surrounded
    return side


class Adam(torch.optim.Adam):
    """PyTorch's, with a state from the start, that ``tensors`` lists."""

    def __init__(self, params, lr: float, **options) -> None:
        super().__init__(list(params), lr=lr, **options)
        for p in self.param_groups[0]["params"]:
            zeros = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            self.state[p] = {"step": torch.zeros(()), **zeros}

    def tensors(self) -> list[torch.Tensor]:
        return [x for p, state in self.state.items() for x in (p.detach(), *state.values())]


def all_tensors(optimizers: Sequence[FlatAdam | Adam]) -> list[torch.Tensor]:
    return [tensor for optimizer in optimizers for tensor in optimizer.tensors()]


def named_parameters(*modules: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    return [dict(module.named_parameters()) for module in modules]
