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
from types import ModuleType

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import leanrl.td3_continuous_action as reference
import leanrl.td3_continuous_action_torchcompile as fast
from leanrl.support.devices import available_cores, set_cpu_numerics
from leanrl.support.envs import make_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.optim import Adam
from leanrl.support.replay import Batch, Replay, TimestepBuffer
from leanrl.tools.ablate_off_policy import (
    ACTION_DIM,
    ACTOR_SIZES,
    CRITICS_SIZES,
    ENV_ID,
    LEGEND,
    NUM_UPDATES,
    OBS_DIM,
    Learner,
    around,
    bursts,
    filled_replay,
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
    pair,
    printed_by_process,
    row_of,
)

TD3 = Group(f"TD3, {ENV_ID}", LEGEND)
REPLAY = Group("The replay of TD3 and SAC, 1,000,000 transitions", LEGEND)
NUM_LOOP_STEPS = 2_000


class Td3:
    """What a script's ``main`` makes before its loop, with a full replay; the same numbers every time."""

    def __init__(
        self,
        script: ModuleType = fast,
        make_optimizer: Callable = Adam,
        make_critics: Callable = fast.Critics,
        replay: Replay | None = None,
        **changes,
    ) -> None:
        self.args = args = fast.Args(compile=True, **changes)
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.actor, critics = script.Actor(*ACTOR_SIZES), make_critics(*CRITICS_SIZES)
        networks = [self.actor, critics, *deepcopy((self.actor, critics))]
        optimizers = [make_optimizer(network.parameters(), lr=args.learning_rate) for network in networks[:2]]
        self.replay = replay or filled_replay()
        self.update, losses = script.make_update(*networks, *optimizers, self.replay, args)
        self.learner = Learner(self.update, [list(network.parameters()) for network in networks], losses, optimizers)


class SeparateCritics(fast.Critics):
    """Two networks, one after the other. Their parameters have the order of the twins'."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__(obs_dim, action_dim)
        for layer in self.children():
            for name, twins in list(layer.named_parameters()):
                delattr(layer, name)
                setattr(layer, name, nn.ParameterList(twin.detach().clone() for twin in twins))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor, count: int = 2) -> torch.Tensor:
        """As fast.Critics."""

        def product(layer: nn.Module, x: torch.Tensor, i: int) -> torch.Tensor:
            return torch.addmm(layer.bias[i], x, layer.weight[i])

        q_values = []
        for i in range(count):
            x = F.relu(product(self.fc1, torch.cat([obs, actions], 1), i))
            x = F.relu(product(self.fc2, x, i))
            q_values.append(product(self.fc3, x, i).squeeze(-1))
        return torch.stack(q_values)


class BaddbmmCritics(fast.Critics):
    def forward(self, obs: torch.Tensor, actions: torch.Tensor, count: int = 2) -> torch.Tensor:
        """As fast.Critics."""

        def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return torch.baddbmm(layer.bias[:count], x, layer.weight[:count])

        x = torch.cat([obs, actions], 1).expand(count, -1, -1)
        x = F.relu(product(self.fc1, x))
        x = F.relu(product(self.fc2, x))
        return product(self.fc3, x).squeeze(-1)


def fast_learner(**changes) -> Learner:
    return Td3(**changes).learner


def reference_learner(fused: bool | None = None) -> Learner:
    return Td3(reference, partial(torch.optim.Adam, fused=fused), reference.Critics).learner


@row_of(TD3)
def td3_update():
    yield same_way("update compiled, not eager", updating(reference_learner(), eager), updating(fast_learner()))


@row_of(TD3)
def td3_one_graph():
    broken = updating(reference_learner(fused=True), in_pieces)
    yield same_way("one graph, not in pieces around .backward() and Adam(fused)", broken, updating(fast_learner()))


@row_of(TD3)
def td3_twins():
    separate = updating(fast_learner(make_critics=SeparateCritics))
    yield same_way("twin critics in one product, not two networks", separate, updating(fast_learner()))


@row_of(TD3)
def td3_bias():
    inside = updating(fast_learner(make_critics=BaddbmmCritics))
    yield same_way("bias added outside the product, not baddbmm", inside, updating(fast_learner()))


class Loop:
    """What happens in the fast TD3 between two steps of the environment."""

    def __init__(self) -> None:
        self.parts = parts = Td3()
        self.last = fast.LastStep.allocate(1, OBS_DIM, ACTION_DIM, CPU)
        self.observe, self.act, _ = fast.make_acting(parts.actor, parts.replay, self.last, parts.args)
        self.advance = fast.make_executables(self.observe, parts.update, self.act, parts.args, CPU)

    def side(self, advance: Callable) -> Side:
        timestep = torch.randn(NUM_UPDATES, 1, OBS_DIM + 3, generator=torch.Generator().manual_seed(0))
        timestep[:, :, -2:] = 0.0  # neither termination nor end
        timestep = itertools.cycle(timestep)
        touched = [*self.last, *self.parts.replay.tensors()]
        learner = replace(self.parts.learner, others=[self.last.actions], touched=touched)
        return bursts(learner, lambda with_actor: advance(next(timestep), ((with_actor,),)))


@row_of(TD3)
def td3_one_executable():
    at_once, in_three = Loop(), Loop()
    observe, act = compiled()(in_three.observe), compiled()(in_three.act)
    updates = {(flag,): compiled()(partial(in_three.parts.update, flag)) for flag in (False, True)}

    def advance(timestep: torch.Tensor, turns: tuple[tuple[bool], ...]) -> torch.Tensor:
        observe(timestep)
        for turn in turns:
            updates[turn]()
        return act()

    sides = in_three.side(advance), at_once.side(at_once.advance)
    yield same_way("observe, update and act as one executable, not three", *sides)


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


def time_steps(freeze: bool) -> None:
    """The fast TD3's loop with its environment, compiled; prints the seconds of NUM_LOOP_STEPS steps."""
    set_cpu_numerics(available_cores())
    loop, envs, episodes = Loop(), make_envs(ENV_ID, 1, 1), EpisodeStatistics(1)
    timestep_buffer, resets = TimestepBuffer(1, OBS_DIM, CPU), np.zeros(1, bool)
    envs.reset()

    def step(with_actor: bool, actions: torch.Tensor) -> torch.Tensor:
        nonlocal resets
        next_obs, rewards, terminations, truncations, _ = envs.step(actions.numpy())
        dones = terminations | truncations
        episodes.add_step(rewards, dones, resets)
        resets = dones
        return loop.advance(timestep_buffer.write(next_obs, rewards, terminations, dones), ((with_actor,),))

    def steps(count: int) -> None:
        actions = loop.last.actions
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
