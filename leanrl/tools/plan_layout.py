"""Predicts the speed of distributed layouts from their measured parts, names the bottleneck, and recommends one.

Measured on this machine, with the script's own code: a rollout of one actor thread (inference and emulation), an update
at two sizes, of one learner and of two at a time, and messages and sums between two processes. Flags after -- are the
script's.

    python -m leanrl.tools.plan_layout --script cleanba_ppo -- --env-id Breakout-v5 --torso nature --device cpu
    python -m leanrl.tools.plan_layout --check a0-l0-d1 a0-l1-d1 -- --env-id CartPole-v1 --device cpu

On a CPU, devices are virtual and share the cores of their machine. Layouts of several groups are planned with a machine
like this one for each group, except those that --check runs: they are planned and run on this one. Other machines'
links are not measured: --link-gbytes is taken for messages between GPUs and between machines.
"""

import importlib
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import tyro

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.algorithm import Shards, Update
from leanrl.sebulba.args import learner_threads, resolve_devices, validate_runtime
from leanrl.sebulba.collectives import sum_in_order
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout, parse_layout
from leanrl.sebulba.params import ParamsSource
from leanrl.sebulba.rollout import Rollout
from leanrl.support.devices import available_cores, keep_freed_memory, set_cpu_numerics
from leanrl.support.errors import UsageError, bad, require_at_least, require_positive
from leanrl.support.run import synchronize, write_json_atomically
from leanrl.tools.common import benchmark_record, describe_machine, markdown_table, results_folder, run_tool
from leanrl.tools.trials import SCRIPTS, read_json, run_groups

# Up to 128 devices.
LAYOUTS = (
    *("a0-l0-d1", "a0-l0,1-d1", "a0-l1-d1", "a0-l1,2-d1", "a0-l1,2,3-d1", "a0,1-l2,3-d1"),
    *(f"a0-l1,2,3-d{groups}" for groups in (2, 4, 8, 16, 32)),
)


@dataclass
class Args:
    script: str = "cleanba_ppo"
    """distributed script"""
    layouts: tuple[str, ...] = LAYOUTS
    """layouts to predict"""
    check: tuple[str, ...] = ()
    """layouts to run here too, beside their prediction"""
    check_updates: int = 20
    """updates of such a run"""
    repeats: int = 3
    """measurements of each part, of which the median counts"""
    link_gbytes: float = 10.0
    """10**9 bytes a second between machines, and between GPUs"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results; by default RUNS_DIR/plan_layout/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags of the script"""


class Cost(NamedTuple):
    """Of a piece of work, in seconds: alone, and how long it keeps one core busy."""

    wall: float
    cores: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.wall + other.wall, self.cores + other.cores)


@dataclass(frozen=True)
class Parts:
    """What was measured."""

    inference: float
    """seconds of a rollout of one actor thread"""
    emulation: float
    """likewise"""
    rollout: Cost
    update: tuple[tuple[int, Cost], tuple[int, Cost]]
    """(environments, cost) of an update, twice"""
    update_alone: tuple[tuple[int, Cost], tuple[int, Cost]]
    """likewise, on as many threads as a learner takes that is the only process"""
    update_beside: tuple[tuple[int, Cost], tuple[int, Cost]]
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

    def update_of(self, num_envs: int, only_process: bool, only_learner: bool) -> Cost:
        """The cost of an update on so many environments: a straight line through the two that were measured."""
        (n0, c0), (n1, c1) = self.update_alone if only_process else self.update if only_learner else self.update_beside
        weight = (num_envs - n0) / (n1 - n0)
        # Far below both, the line through two noisy numbers may fall under 0.
        return Cost(*(max(a + weight * (b - a), 0.2 * a) for a, b in zip(c0, c1, strict=True)))


class Prediction(NamedTuple):
    layout: str
    devices: int
    num_envs: int
    sps: float
    seconds: dict[str, float]
    """of an iteration: rollout, transfer, update, all-reduce"""
    bottleneck: str


# -------------------------------------------------------------------------------------------------------- MEASUREMENT


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
def measure(args: Args, module, script_args, device: torch.device) -> Parts:
    """Measures every part, in this process and, for messages, in two others."""
    script_args.num_envs = num_envs = script_args.local_num_envs
    num_threads = script_args.num_threads or 1
    set_cpu_numerics(num_threads)
    keep_freed_memory()
    layout = Layout((0,), (0,), 1, 1, num_envs)
    env_threads = script_args.env_threads or max(1, available_cores() // script_args.num_actor_threads)
    pool = make_pool(script_args.env_id, range(num_envs), script_args.seed, script_args.protocol, env_threads)
    space, num_actions = pool.single_observation_space, int(pool.single_action_space.n)
    agent = module.make_agent(space, num_actions, script_args).to(device)
    source = ParamsSource(torch.zeros(1, device=device), 0, 0, 60)
    told = (script_args, device, 0, 1, lambda *error: None)
    thread = ActorThread("actor thread", layout.pieces_of_thread(0, 0), pool, agent, source, *told)
    thread.warm_up()
    obs, _ = pool.reset()
    piece = Rollout.allocate(script_args.num_steps, num_envs, space.shape, torch.from_numpy(obs).dtype, device)
    resets = torch.zeros(num_envs, dtype=torch.bool).numpy()
    header = piece.read_header()
    rollout = timed(lambda: thread.play_rollout([piece], header, obs, resets), args.repeats, device)
    header = piece.read_header()
    pool.close()

    threads_alone = num_threads
    if device.type == "cpu":
        one_process = Layout((0,), (0,), 1, script_args.num_actor_threads, num_envs)
        threads_alone = learner_threads(script_args, one_process, is_image=space.dtype == np.uint8)
    updates = {}
    sizes = max(1, num_envs // 2), num_envs
    for threads, size in itertools.product({num_threads, threads_alone}, sizes):
        torch.set_num_threads(threads)
        shard = Rollout.allocate(script_args.num_steps, size, space.shape, piece.obs.dtype, device)
        for target, filled in zip(shard.columns(), piece.columns(), strict=True):
            target.copy_(filled[:, :size])
        update, params = make_update(module, script_args, num_actions, space, Shards([0], [shard], 1, sum_in_order))
        cost = timed(lambda update=update: update.run(1), args.repeats, device)
        updates[threads] = (*updates.get(threads, ()), (size, cost))
    num_bytes = len(piece.buffer)
    if device.type == "cuda":  # what two processes on a CPU do says nothing about GPUs
        message = reduction = (20e-6, 1 / (1e9 * args.link_gbytes))
        beside, waiting = updates[num_threads], 0.0
    else:
        message, reduction = in_two_processes(time_links, (num_bytes, 4 * params), max(3, args.repeats))[0]
        beside, sums = in_two_processes(learn_beside, args.script, script_args, sizes, args.repeats)[0]
        waiting = max(0.0, sums - update.num_steps * (reduction[0] + reduction[1] * 4 * params))
    return Parts(
        inference=header.inference + header.device_to_host,
        emulation=header.env_step,
        rollout=rollout,
        update=updates[num_threads],
        update_alone=updates[threads_alone],
        update_beside=beside,
        waiting=waiting,
        message=message,
        reduction=reduction,
        rollout_bytes=num_bytes // num_envs,
        params=params,
        steps=update.num_steps,
    )


def make_update(module, script_args, num_actions: int, space, shards: Shards) -> tuple[Update, int]:
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
def learn_beside(rank: int, script: str, script_args, sizes: Sequence[int], repeats: int) -> tuple[tuple, float]:
    """What updates cost one of two learners that take them at the same time here.

    Returns:
        (environments, cost without the sums) of each of ``sizes``; seconds of the last one's sums, waiting included.
    """
    module = importlib.import_module(f"leanrl.{script}")
    set_cpu_numerics(script_args.num_threads or 1)
    keep_freed_memory()
    pool = make_pool(script_args.env_id, range(1), script_args.seed, script_args.protocol)
    space, num_actions = pool.single_observation_space, int(pool.single_action_space.n)
    pool.close()
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
        num_bytes: of the messages and of the sums that are to be told.
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


# --------------------------------------------------------------------------------------------------------- PREDICTION


def predict(text: str, parts: Parts, script_args, cores: int, machines: int, link_gbytes: float) -> Prediction:
    """The speed of a layout.

    Args:
        cores: of a machine.
        machines: that the groups are spread over.
    """
    actors, learners, num_groups = parse_layout(text)
    threads, local = script_args.num_actor_threads, script_args.local_num_envs
    layout = Layout(actors, learners, num_groups, threads, local)
    groups = math.ceil(num_groups / machines)
    num_threads, num_learners = groups * len(actors) * threads, groups * len(learners)
    update = parts.update_of(
        layout.num_envs // layout.num_learners,
        only_process=len(layout.parts) == 1,
        only_learner=num_learners == 1 or script_args.device != "cpu",
    )
    rollout = max(parts.rollout.wall, num_threads * parts.rollout.cores / cores)
    if script_args.device != "cpu":  # the threads of a device share it
        rollout = max(rollout, threads * parts.inference)
    updating = max(update.wall, num_learners * update.cores / cores)

    # Every byte that leaves its process; a machine's messages share its memory or its link.
    foreign = sum(
        len(piece.envs)
        for learner in range(len(learners))
        for piece in layout.pieces_of_learner(learner)
        if layout.actor_part(piece.actor).rank != layout.learner_part(learner).rank
    )
    latency, per_byte = parts.message
    remote_actors = len([part for part in layout.parts if part.learner is None and part.group == 0])
    transfer = (latency + per_byte * parts.rollout_bytes * foreign) * groups if foreign else 0.0
    transfer += remote_actors * groups * (latency + per_byte * 4 * parts.params)
    reduction = 0.0
    if layout.num_learners > 1:
        latency, per_byte = parts.reduction
        if machines > 1:
            per_byte = max(per_byte, 1 / (1e9 * link_gbytes))
        n = layout.num_learners
        # Rings pass 2 (n - 1) / n of the vector through each link: the whole of it once where n = 2, as measured.
        reduction = parts.steps * (latency * math.log2(n) + per_byte * 4 * parts.params * 2 * (n - 1) / n)
        reduction += parts.waiting
    seconds = {"rollout": rollout, "transfer": transfer, "update": updating, "all-reduce": reduction}
    work = (num_threads * parts.rollout.cores + num_learners * update.cores) / cores
    learning = transfer + updating + reduction
    shared = script_args.device == "cpu" or set(actors) & set(learners)
    whole = rollout + learning
    if script_args.policy_lag > 0:
        whole = max(rollout, learning, work) if script_args.device == "cpu" or not shared else whole
    slowest = max(seconds, key=seconds.get)
    if slowest == "rollout":
        slowest = "emulation" if parts.emulation > parts.inference else "inference"
    devices = len(layout.parts)
    return Prediction(text, devices, layout.num_envs, layout.num_envs * script_args.num_steps / whole, seconds, slowest)


def recommend(predictions: Sequence[Prediction], parts: Parts, cores: int) -> list[str]:
    """Advice in sentences."""
    fastest = max(predictions, key=lambda p: p.sps)
    thrifty = max(predictions, key=lambda p: p.sps / p.devices)
    threads = min(max(1, cores), 1 + math.ceil(parts.emulation / max(parts.inference, 1e-9)))
    (_, half), (_, full) = parts.update
    grows = full.wall < 1.7 * half.wall
    return [
        f"Fastest: {fastest.layout}, {fastest.sps:,.0f} steps a second; its bottleneck is {fastest.bottleneck}.",
        f"Most for each device: {thrifty.layout}, {thrifty.sps / thrifty.devices:,.0f} steps a second.",
        f"Actor threads: {threads}, so that some emulate while one infers"
        f" ({parts.emulation:.2g} s against {parts.inference:.2g} s a rollout).",
        f"Environments: more; an update of twice as many takes {full.wall / half.wall:.1f} times as long."
        if grows
        else "Environments: enough; an update's time grows with their number.",
    ]


# -------------------------------------------------------------------------------------------------------------- CHECK


def run_layout(text: str, args: Args, script_args, folder: Path) -> float:
    """Runs a layout here, all groups on this machine; returns its steps per second. SystemExit where it fails."""
    actors, learners, num_groups = parse_layout(text)
    num_envs = script_args.local_num_envs * script_args.num_actor_threads * len(actors) * num_groups
    total = args.check_updates * num_envs * script_args.num_steps
    command = [sys.executable, str(SCRIPTS / f"{args.script}.py"), *args.script_args]
    command += ["--actor-device-ids", *map(str, actors), "--learner-device-ids", *map(str, learners)]
    command += [f"--total-timesteps={total}", "--runs-dir", str(folder), "--run-name", text.replace(",", "")]
    run_groups(text, command, num_groups)
    return read_json(folder / text.replace(",", "") / "summary.json")["sps"]


# ------------------------------------------------------------------------------------------------------------ RESULTS


def render(predictions: Sequence[Prediction], measured: dict[str, float]) -> str:
    header = ["layout", "devices", "environments", "sps", "rollout s", "transfer s", "update s", "all-reduce s"]
    header += ["bottleneck", *(["measured sps", "off by"] if measured else [])]
    rows = []
    for p in predictions:
        row = [p.layout, f"{p.devices}", f"{p.num_envs:,}", f"{p.sps:,.0f}"]
        row += [*(f"{seconds:.3g}" for seconds in p.seconds.values()), p.bottleneck]
        if measured:
            sps = measured.get(p.layout)
            row += ["", ""] if sps is None else [f"{sps:,.0f}", f"{p.sps / sps - 1:+.0%}"]
        rows.append(row)
    return markdown_table(header, rows)


def main(args: Args) -> int:
    require_at_least(args, 1, "repeats", "check_updates")
    require_positive(args, "link_gbytes")
    known = sorted(path.stem for path in SCRIPTS.glob("cleanba_*.py"))
    if args.script not in known:
        raise bad("script", args.script, f"is no distributed script; there are {', '.join(known)}")
    module = __import__(f"leanrl.{args.script}", fromlist=["Args"])
    script_args = tyro.cli(module.Args, args=list(args.script_args), prog=args.script)
    module.validate(script_args)
    validate_runtime(script_args)
    device = resolve_devices(script_args)
    script_args.device = device.type
    layouts = []
    for text in dict.fromkeys((*args.check, *args.layouts)):
        actors, learners, groups = parse_layout(text)
        try:
            layout = Layout(actors, learners, groups, script_args.num_actor_threads, script_args.local_num_envs)
            module.validate_shards(script_args, layout)
        except UsageError as error:
            if text in args.check:
                raise
            print(f"leaving out {text}: {error}", file=sys.stderr, flush=True)
            continue
        layouts.append(text)
    if not layouts:
        raise bad("layouts", args.layouts, "none of them fits the script's flags")

    out = results_folder(args, "plan_layout")
    print("measuring the parts", flush=True)
    cores = available_cores()
    parts = measure(args, module, script_args, device)
    predictions = []
    for text in layouts:
        machines = 1 if text in args.check else parse_layout(text)[-1]
        predictions.append(predict(text, parts, script_args, cores, machines, args.link_gbytes))
    measured = {}
    for text in args.check:
        print(f"running {text}", flush=True)
        measured[text] = run_layout(text, args, script_args, out / "runs")
    record = {**benchmark_record("plan_layout", device), "parts": asdict(parts), "measured": measured}
    record["predictions"] = [prediction._asdict() for prediction in predictions]
    write_json_atomically(out / "plan_layout.json", record)
    advice = "\n".join(f"- {line}" for line in recommend(predictions, parts, cores))
    text = f"{args.script}, {script_args.env_id}, {describe_machine(record['machine'])}\n\n"
    text += f"{render(predictions, measured)}\n\n{advice}"
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\nJSON: {out / 'plan_layout.json'}")
    return 0


if __name__ == "__main__":
    run_tool(main, Args)
