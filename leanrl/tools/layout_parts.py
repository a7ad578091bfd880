"""Measures the parts that layouts of actors and learners are made of, for plan_layout: what each costs on this machine.

With the script's own code, each part at two sizes: a rollout of one actor thread (inference and emulation), an update
of one learner and of two at a time, and messages and sums between two processes. Lines through the two give the rest.
"""

import importlib
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from types import ModuleType
from typing import NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.algorithm import Shards, Update
from leanrl.sebulba.args import learner_threads
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.params import ParamsSource
from leanrl.sebulba.rollout import Rollout
from leanrl.support.devices import available_cores, keep_freed_memory, set_cpu_numerics
from leanrl.support.run import synchronize


class Cost(NamedTuple):
    """Of a piece of work, in seconds: alone, and how long it keeps one core busy."""

    wall: float
    cores: float


class RolloutCost(NamedTuple):
    """Of a rollout of one actor thread: its ``Cost``, and the seconds of its two parts."""

    wall: float
    cores: float
    inference: float
    emulation: float


AnyCost = TypeVar("AnyCost", Cost, RolloutCost)
Measured = tuple[tuple[int, AnyCost], tuple[int, AnyCost]]
"""(environments, cost) twice, the smaller number first"""


def cost_of(num_envs: int, measured: Measured[AnyCost]) -> AnyCost:
    """The cost for so many environments: a straight line through the two that were measured."""
    (n0, c0), (n1, c1) = measured
    weight = (num_envs - n0) / (n1 - n0)
    # Far below both, the line through two noisy numbers may fall under 0.
    return type(c0)(*(max(a + weight * (b - a), 0.2 * a) for a, b in zip(c0, c1, strict=True)))


@dataclass(frozen=True)
class Parts:
    """What was measured."""

    rollout: Measured[RolloutCost]
    """of one actor thread with so many environments"""
    update: Measured[Cost]
    """of a learner with so many environments"""
    update_alone: Measured[Cost]
    """likewise, on as many threads as a learner takes that is the only process"""
    update_beside: Measured[Cost]
    """likewise, of one of two learners that learn at the same time here, without what their sums take"""
    waiting: float
    """seconds of an update that such a learner waits for the other, beside what the sums themselves take"""
    message: tuple[float, float]
    """latency in seconds, and seconds a byte, from process to process"""
    reduction: tuple[float, float]
    """likewise, of a sum over two"""
    rollout_bytes: int
    """of one environment"""
    params: int
    steps: int
    """optimiser steps of an update"""


def timed(fn, repeats: int, device: torch.device) -> Cost:
    """The median cost of calls of ``fn``, after one that is not counted."""
    costs = []
    for _ in range(repeats + 1):
        synchronize(device)
        wall, cores = time.perf_counter(), time.process_time()
        fn()
        synchronize(device)
        costs.append(Cost(time.perf_counter() - wall, time.process_time() - cores))
    return sorted(costs[1:])[repeats // 2]


@torch.no_grad()
def measure(
    script: str, script_args, device: torch.device, learner_envs: int, repeats: int, nvlink_gbytes: float
) -> Parts:
    """Measures every part, in this process and, for messages and learners side by side, in two others.

    Args:
        script: distributed script; ``script_args`` are its arguments.
        learner_envs: fewest environments of a learner in what is to be planned. Updates are measured at them and at
            twice as many: where the minibatches divide a shard, they divide two.
        repeats: measurements of each part, of which the median counts.
        nvlink_gbytes: 10**9 bytes a second between the GPUs of this machine, which is not measured.
    """
    module = importlib.import_module(f"leanrl.{script}")
    # Of a schedule that no speed depends on: one iteration, which no number of environments is too large for.
    script_args = replace(script_args, num_envs=1, total_timesteps=script_args.num_steps)
    num_envs, num_threads = script_args.local_num_envs, script_args.num_threads or 1
    set_cpu_numerics(num_threads)
    space, num_actions = spaces(script_args)
    if space.dtype == np.uint8:
        keep_freed_memory()
    rollouts = []
    for size in (num_envs, 2 * num_envs):
        cost, piece = measure_rollout(module, script_args, device, size, repeats)
        rollouts.append((size, cost))
    rollout_bytes = len(piece.buffer) // (2 * num_envs)

    threads_alone = num_threads
    if device.type == "cpu":
        one_process = Layout((0,), (0,), 1, script_args.num_actor_threads, num_envs)
        threads_alone = learner_threads(script_args, one_process, is_image=space.dtype == np.uint8)
    updates, sizes = {}, (learner_envs, 2 * learner_envs)
    for threads, size in itertools.product({num_threads, threads_alone}, sizes):
        torch.set_num_threads(threads)
        shard = Rollout.allocate(script_args.num_steps, size, space.shape, piece.obs.dtype, device)
        for target, played in zip(shard.columns(), piece.columns(), strict=True):
            target.copy_(played[:, torch.arange(size) % (2 * num_envs)])
        update, params = make_update(module, script_args, num_actions, space, Shards([0], [shard], 1, sum_in_order))
        cost = timed(lambda update=update: update.run(1), repeats, device)
        updates[threads] = (*updates.get(threads, ()), (size, cost))
    if device.type == "cuda":  # what two processes on a CPU do says nothing about GPUs
        message = reduction = (20e-6, 1 / (1e9 * nvlink_gbytes))
        beside, waiting = updates[num_threads], 0.0
    else:
        num_bytes = rollout_bytes * num_envs, 4 * params
        message, reduction = in_two_processes(time_links, num_bytes, max(3, repeats))[0]
        beside, sums = in_two_processes(learn_beside, script, script_args, sizes, repeats)[0]
        waiting = max(0.0, sums - update.num_steps * (reduction[0] + reduction[1] * 4 * params))
    return Parts(
        rollout=tuple(rollouts),
        update=updates[num_threads],
        update_alone=updates[threads_alone],
        update_beside=beside,
        waiting=waiting,
        message=message,
        reduction=reduction,
        rollout_bytes=rollout_bytes,
        params=params,
        steps=update.num_steps,
    )


def spaces(script_args) -> tuple[gym.spaces.Box, int]:
    """The observations and the number of actions of the script's environment."""
    pool = make_pool(script_args.env_id, range(1), script_args.seed, script_args.protocol)
    pool.close()
    return pool.single_observation_space, int(pool.single_action_space.n)


def measure_rollout(
    module: ModuleType, script_args, device: torch.device, num_envs: int, repeats: int
) -> tuple[RolloutCost, Rollout]:
    """What a rollout of one actor thread with so many environments costs, and the last one that was played."""
    env_threads = script_args.env_threads or max(1, available_cores() // script_args.num_actor_threads)
    pool = make_pool(script_args.env_id, range(num_envs), script_args.seed, script_args.protocol, env_threads)
    space = pool.single_observation_space
    agent = module.make_agent(space, int(pool.single_action_space.n), script_args).to(device)
    pieces = Layout((0,), (0,), 1, 1, num_envs).pieces_of_thread(0, 0)
    source = ParamsSource(torch.zeros(1, device=device), 0, 0, 60)
    rest = (script_args, device, 0, 1, lambda *error: None)
    thread = ActorThread("actor thread", pieces, pool, agent, source, *rest)
    thread.warm_up()
    obs, _ = pool.reset()
    piece = Rollout.allocate(script_args.num_steps, num_envs, space.shape, torch.from_numpy(obs).dtype, device)
    resets, header = np.zeros(num_envs, bool), piece.read_header()
    cost = timed(lambda: thread.play_rollout([piece], header, obs, resets), repeats, device)
    pool.close()
    header = piece.read_header()
    return RolloutCost(*cost, header.inference + header.device_to_host, header.env_step), piece


def make_update(module: ModuleType, script_args, num_actions: int, space, shards: Shards) -> tuple[Update, int]:
    """A new learner's update on ``shards``, warmed up, and how many parameters it has."""
    device = shards.rollouts[0].buffer.device
    learner = module.make_agent(space, num_actions, script_args).to(device)
    optimizer = module.make_optimizer(learner, script_args)
    update = module.make_update(learner, optimizer, shards, script_args, device)
    update.warm_up()
    return update, len(optimizer.params)


def in_two_processes(function: Callable, *args) -> list:
    """What ``function(rank, *args)`` returns in two processes that run at the same time, ranks 0 and 1 of a group."""
    # The two meet at a file: no port that somebody else may have.
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        words = (f"{folder}/rendezvous", function, *args)
        return list(pool.map(as_rank, (0, 1), *([word] * 2 for word in words)))


def as_rank(rank: int, file: str, function: Callable, *args):
    """``function(rank, *args)``, as one of the two processes that meet at ``file``."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        return function(rank, *args)
    finally:  # where one fails, the other is not to wait for it
        dist.destroy_process_group()


@torch.no_grad()
def learn_beside(
    rank: int, script: str, script_args, sizes: Sequence[int], repeats: int
) -> tuple[Measured[Cost], float]:
    """What updates cost one of two learners that take them at the same time here.

    Returns:
        (environments, cost without the sums) of each of ``sizes``; seconds of the last one's sums, waiting included.
    """
    module = importlib.import_module(f"leanrl.{script}")
    set_cpu_numerics(script_args.num_threads or 1)
    space, num_actions = spaces(script_args)
    if space.dtype == np.uint8:
        keep_freed_memory()
    sums = 0.0

    def sum_over(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal sums
        start, total = time.perf_counter(), sum_in_order(vectors)
        dist.all_reduce(total)
        sums += time.perf_counter() - start
        return total

    found = []
    for size in sizes:
        dtype = torch.from_numpy(space.sample()).dtype
        shard = Rollout.allocate(script_args.num_steps, size, space.shape, dtype, torch.device("cpu"))
        update, _ = make_update(module, script_args, num_actions, space, Shards([rank], [shard], 2, sum_over))
        costs = []
        for _ in range(repeats + 1):
            dist.barrier()
            sums, wall, cores = 0.0, time.perf_counter(), time.process_time()
            update.run(1)
            costs.append((Cost(time.perf_counter() - wall - sums, time.process_time() - cores), sums))
        cost, last_sums = sorted(costs[1:])[repeats // 2]
        found.append((size, cost))
    return tuple(found), last_sums


def time_links(rank: int, num_bytes: tuple[int, int], repeats: int) -> list[tuple[float, float]]:
    """(latency, seconds a byte) of a message and of a sum between two processes here.

    Args:
        num_bytes: of the messages and of the sums that are wanted.
    """
    torch.set_num_threads(1)

    def send(x: torch.Tensor) -> None:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x[:1], 1)
        else:
            dist.recv(x, 0)
            dist.send(x[:1], 0)

    def seconds_of(operation: Callable, size: int) -> float:
        x, seconds = torch.zeros(size // 4), []
        for _ in range(repeats + 2):
            dist.barrier()
            start = time.perf_counter()
            operation(x)
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[2:])[repeats // 2]

    found = []
    for operation, size in zip((send, dist.all_reduce), num_bytes, strict=True):
        small, large = 64, max(size, 4096)
        latency, whole = seconds_of(operation, small), seconds_of(operation, large)
        found.append((latency, max(whole - latency, 0.0) / (large - small)))
    return found
