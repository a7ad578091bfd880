"""What the rows of TD3, SAC and DQN share: parts of ``leanrl.tools.ablate``."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from leanrl.support.devices import available_cores
from leanrl.support.replay import Replay
from leanrl.tools.ablation import CPU, Compiler, Side, compiled, pair

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
    """An update of TD3 or SAC, and what it changes."""

    update: Callable[[bool], None]
    """trains on one batch; the flag says whether the actor too"""
    networks: Sequence[Sequence[torch.Tensor]]
    """the parameters of each, the targets' too"""
    losses: Sequence[torch.Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Sequence[torch.Tensor] = ()
    """to compare beside the losses and parameters"""
    touched: Sequence[torch.Tensor] = ()
    """changed beside those and the optimisers' states"""
    compiler: Compiler = field(default_factory=compiled)
    """the fast variant's"""


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The state of an optimiser that has not taken a step yet."""
    if not optimizer.state:  # PyTorch's makes it in its first step; along gradients of 0, no parameter moves
        params = optimizer.param_groups[0]["params"]
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        for p in params:
            optimizer.state[p]["step"].zero_()
    return [x for state in optimizer.state.values() for x in state.values()]


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of all of them as one vector."""
    return torch.cat([p.detach().flatten() for p in parameters])


def bursts(learner: Learner, step: Callable[[bool], None], num_threads: int | None = None) -> Side:
    """``step(with_actor)`` NUM_UPDATES times, which moves the learner's parameters; by default on all cores."""
    starts = [flat(network) for network in learner.networks]
    # A burst's samples are its own, so that they are not in the cache from the one before.
    seeds = itertools.count()

    def results():
        yield from learner.losses
        yield from learner.others
        for network, start in zip(learner.networks, starts, strict=True):
            yield flat(network) - start

    def burst():
        torch.default_generator.manual_seed(next(seeds))
        with torch.enable_grad():
            for with_actor in PATTERN:
                step(with_actor)
        return results()

    touched = [*learner.losses, *learner.others, *learner.touched, *itertools.chain(*learner.networks)]
    touched += itertools.chain(*map(state_tensors, learner.optimizers))
    return Side(burst, NUM_UPDATES, NUM_UPDATES, touched, num_threads or available_cores())


def updating(learner: Learner, compiler: Compiler | None = None, num_threads: int | None = None) -> Side:
    """A burst of updates, by default compiled as the fast variants'."""
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
