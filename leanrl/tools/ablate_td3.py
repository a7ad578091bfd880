"""What each trick of the fast TD3, and of the replay, is worth: rows of ``leanrl.tools.ablate``.

At the default hyperparameters, with HalfCheetah-v5's sizes.
"""

import gc
import itertools
import math
import tempfile
import timeit
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

import leanrl.td3_continuous_action as reference
import leanrl.td3_continuous_action_torchcompile as fast
from leanrl.support import optim
from leanrl.support.devices import available_cores, set_cpu_numerics
from leanrl.support.envs import make_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.optim import FlatAdam
from leanrl.support.replay import Batch, Replay, TimestepBuffer
from leanrl.tools.ablate_off_policy import (
    ACTION_DIM,
    ACTOR_SIZES,
    CRITICS_SIZES,
    ENV_ID,
    LEGEND,
    NUM_UPDATES,
    OBS_DIM,
    Adam,
    Learner,
    all_tensors,
    around,
    bursts,
    filled_replay,
    named_parameters,
    roughly,
    same_way,
    updating,
)
from leanrl.tools.ablation import (
    CPU,
    Group,
    Pair,
    Side,
    compiled,
    eager,
    in_pieces,
    matrix_products,
    outcome,
    pair,
    printed_by_process,
    row_of,
)

TD3 = Group(f"TD3, {ENV_ID}", LEGEND)
REPLAY = Group("The replay of TD3 and SAC, 1,000,000 transitions", LEGEND)
NUM_LOOP_STEPS = 2_000


class Td3:
    """What the fast rung's ``main`` makes before its loop, with a full replay; the same numbers every time."""

    def __init__(self, critics: type = fast.Critics, replay: Replay | None = None, **changes) -> None:
        self.args = args = fast.Args(compile=True, **changes)
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            networks = fast.Actor(*ACTOR_SIZES), critics(*CRITICS_SIZES)
        optimizers = [FlatAdam(network, lr=args.learning_rate, eps=1e-8) for network in networks]
        targets = [optimizer.params.clone() for optimizer in optimizers]
        self.replay = replay or filled_replay()
        self.update, losses = fast.make_update(*optimizers, *targets, self.replay, args)
        self.last = fast.LastStep.allocate(1, OBS_DIM, ACTION_DIM, CPU)
        self.observe, self.act, _ = fast.make_acting(optimizers[0], self.replay, self.last, args)
        vectors = [(optimizer, optimizer.params) for optimizer in optimizers]
        vectors += zip(optimizers, targets, strict=True)
        parameters = [optimizer.unflatten(vector) for optimizer, vector in vectors]
        touched = [*all_tensors(optimizers), *targets, losses, *self.replay.tensors(), *self.last]
        self.learner = Learner(self.update, [losses], parameters, touched, compiler=compiled())


class SeparateCritics(reference.Critics):
    def forward(self, obs: torch.Tensor, actions: torch.Tensor, count: int = 2) -> torch.Tensor:
        """As fast.Critics."""
        return torch.stack([qf(obs, actions) for qf in (self.qf1, self.qf2)[:count]])


class BaddbmmCritics(fast.Critics):
    def forward(self, obs: torch.Tensor, actions: torch.Tensor, count: int = 2) -> torch.Tensor:
        """As fast.Critics."""
        x = torch.cat([obs, actions], 1).expand(count, -1, -1)
        x = F.relu(torch.baddbmm(self.bias1[:count], x, self.weight1[:count]))
        x = F.relu(torch.baddbmm(self.bias2[:count], x, self.weight2[:count]))
        return (x * self.weight3[:count].mT).sum(-1) + self.bias3[:count, 0]


def fast_learner(critics: type = fast.Critics, replay: Replay | None = None, **changes) -> Learner:
    return Td3(critics, replay, **changes).learner


def reference_learner(fused: bool = False) -> Learner:
    """The reference's: ``.backward()`` and ``torch.optim.Adam``."""
    args = reference.Args()
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        trained = reference.Actor(*ACTOR_SIZES), reference.Critics(*CRITICS_SIZES)
    networks = [*trained, *deepcopy(trained)]
    optimizers = [Adam(network.parameters(), args.learning_rate, fused=fused) for network in trained]
    update, losses = reference.make_update(*networks, *optimizers, filled_replay(), args)
    targets = [p.detach() for network in networks[2:] for p in network.parameters()]
    touched = [*all_tensors(optimizers), *targets, losses]
    return Learner(update, [losses], named_parameters(*networks), touched, with_grad=True)


@row_of(TD3)
def td3_update():
    yield same_way("update written out, eager", updating(reference_learner()), updating(fast_learner(), eager))
    yield same_way("update written out and compiled", updating(reference_learner()), updating(fast_learner()))


@row_of(TD3)
def td3_one_graph():
    broken = updating(reference_learner(fused=True), in_pieces)
    yield same_way("one graph, not .backward() and Adam(fused)", broken, updating(fast_learner()))


@row_of(TD3)
def td3_twins():
    separate = updating(fast_learner(SeparateCritics))
    yield same_way("twin critics in one product, not two networks", separate, updating(fast_learner()))


@row_of(TD3)
def td3_bias():
    inside = updating(fast_learner(BaddbmmCritics))
    yield same_way("bias added outside the product, not baddbmm", inside, updating(fast_learner()))


@row_of(TD3)
def td3_scalars():
    inlined, once = updating(fast_learner()), updating(fast_learner())
    with patch.object(optim, "computed_once", lambda scalar: scalar):
        outcome(inlined)  # which compiles it
    outcome(once)
    yield same_way("Adam's scalars computed once", inlined, once)


@row_of(TD3)
def td3_concatenation():
    """Read in place, through one condition for each part, they keep Adam's loop from being vectorised."""
    concatenated = updating(fast_learner(), compiled(max_pointwise_cat_inputs=0))
    yield same_way("not used: gradients concatenated first", updating(fast_learner()), concatenated)


@row_of(TD3)
def td3_one_executable():
    def stepping(parts: Td3, advance: Callable) -> Side:
        timestep = torch.randn(NUM_UPDATES, 1, OBS_DIM + 3, generator=torch.Generator().manual_seed(0))
        timestep[:, :, -2:] = 0.0  # neither termination nor end
        timestep = itertools.cycle(timestep)
        learner = replace(parts.learner, results=[*parts.learner.results, parts.last.actions])
        return bursts(learner, lambda with_actor: advance(next(timestep), (with_actor,)))

    def at_once() -> Side:
        parts = Td3()
        return stepping(parts, fast.make_executables(parts.observe, parts.update, parts.act, parts.args, CPU))

    def in_three() -> Side:
        parts = Td3()
        observe, act = compiled()(parts.observe), compiled()(parts.act)
        updates = {(flag,): compiled()(partial(parts.update, flag)) for flag in (False, True)}

        def advance(timestep: torch.Tensor, with_actor: tuple[bool]) -> torch.Tensor:
            observe(timestep)
            updates[with_actor]()
            return act()

        return stepping(parts, advance)

    yield same_way("observe, update and act as one executable, not three", in_three(), at_once())


@row_of(TD3)
def td3_threads():
    cores = available_cores()
    for precision, changes in (("float32", {}), ("bf16", {"amp": "bf16"})):
        one, all_cores = (updating(fast_learner(**changes), num_threads=n) for n in (1, cores))
        yield (roughly if changes else same_way)(f"{cores} threads, not 1: {precision}", one, all_cores)


@row_of(TD3)
def td3_bf16():
    """Without AMX units, oneDNN computes the products in float32 all the same (support/devices.py)."""
    yield roughly("--amp bf16, not float32", updating(fast_learner()), updating(fast_learner(amp="bf16")))
    products = around(updating(fast_learner()), partial(matrix_products, "bf16"))
    yield roughly("--amp bf16, not bf16 in products of float32 only", products, updating(fast_learner(amp="bf16")))


@row_of(TD3)
def td3_onednn():
    """Only on AMD's processors: elsewhere the scripts leave PyTorch its own choice."""
    mkl = around(updating(fast_learner()), partial(matrix_products, "none"))
    yield same_way("oneDNN's float32 products, not MKL's", mkl, updating(fast_learner()))


@row_of(TD3)
def td3_random():
    """The other samples are as good; with PyTorch's, compiled and eager runs see the same ones."""
    own = updating(fast_learner(), compiled(fallback_random=False))
    yield pair("PyTorch's random numbers, not TorchInductor's", own, updating(fast_learner()), tolerance=math.inf)


@row_of(TD3)
def td3_freeze():
    with tempfile.TemporaryDirectory() as cache:

        def sample(freeze: bool) -> float:
            return printed_by_process(__name__, f"time_steps({freeze})", cache)

        trick = "what the set-up made hidden from the garbage collector"
        yield Pair(trick, partial(sample, False), partial(sample, True), NUM_LOOP_STEPS, NUM_LOOP_STEPS)


@torch.no_grad()
def time_steps(freeze: bool) -> None:
    """The fast TD3's loop with its environment, compiled; prints the seconds of NUM_LOOP_STEPS steps."""
    set_cpu_numerics(available_cores())
    parts, envs, episodes = Td3(), make_envs(ENV_ID, 1, 1), EpisodeStatistics(1)
    advance = fast.make_executables(parts.observe, parts.update, parts.act, parts.args, CPU)
    timestep_buffer, resets = TimestepBuffer(1, OBS_DIM, CPU), np.zeros(1, bool)
    envs.reset()

    def step(with_actor: bool, actions: torch.Tensor) -> torch.Tensor:
        nonlocal resets
        next_obs, rewards, terminations, truncations, _ = envs.step(actions.numpy())
        dones = terminations | truncations
        episodes.add_step(rewards, dones, resets)
        resets = dones
        return advance(timestep_buffer.write(next_obs, rewards, terminations, dones), (with_actor,))

    def steps(count: int) -> None:
        actions = parts.last.actions
        for i in range(count):
            actions = step(i % 2 == 1, actions)

    steps(4)
    if freeze:
        # As Run.start_clock.
        gc.collect()
        gc.freeze()
    print(timeit.timeit(lambda: steps(NUM_LOOP_STEPS), number=1))


# ------------------------------------------------------------------------------------------------------------- REPLAY


class ReplayOfColumns(Replay):
    """A tensor for each part of a transition, not one matrix; for sampling."""

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.columns = [x.contiguous() for x in super().take(torch.arange(self.capacity))]

    def take(self, inds: torch.Tensor) -> Batch:
        return Batch(*(column.index_select(0, inds) for column in self.columns))


@row_of(REPLAY)
def replay_rows():
    """A million transitions, so that few of the sampled ones are in a cache."""
    kinds = (ReplayOfColumns, Replay)
    columns, rows = (filled_replay(1_000_000, kind) for kind in kinds)

    def sampling(replay: Replay) -> Side:
        def burst():
            for _ in range(100):
                batch = replay.sample(fast.Args.batch_size)
            return batch

        return Side(burst, 100, 100, num_threads=available_cores())

    yield pair("a transition is one row, not in five tensors: sampling, eager", sampling(columns), sampling(rows))
    columns, rows = (updating(fast_learner(replay=replay)) for replay in (columns, rows))
    yield same_way("a transition is one row, not in five tensors: TD3's update, compiled", columns, rows)
