"""Predicts the speed of distributed layouts from measured parts, names their bottlenecks, and recommends one.

Short runs of the script on this machine, at two sizes, measure a rollout of one actor thread (inference and emulation),
an update of one learner and of two at a time, and their gradient sums. Straight lines through these give the time of
other layouts, and of other numbers of actor threads and environments. Flags after -- are the script's.

    python -m leanrl.tools.plan_layout --script cleanba_ppo -- --env-id Breakout-v5 --torso nature --device cpu
    python -m leanrl.tools.plan_layout --check a0-l0-d1 a0-l1-d1 -- --env-id CartPole-v1 --device cpu

On a CPU, devices are virtual and share the cores of their machine. Layouts of several groups are planned with a machine
like this one for each group, except those that --check runs: they are planned and run on this one. Not measured are
messages (--nvlink-gbytes is assumed between the GPUs of a machine, --network-gbytes between machines) and the time that
actor threads wait for each other in Python, which matters for environments like CartPole.
"""

import importlib
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import tyro

from leanrl.sebulba.args import check_devices, learner_threads, validate_runtime
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout, parse_layout
from leanrl.sebulba.rollout import Rollout
from leanrl.support.devices import available_cores
from leanrl.support.errors import UsageError, bad, require_at_least, require_positive, typed
from leanrl.support.tracking import read_metrics
from leanrl.tools import common
from leanrl.tools.trials import DISTRIBUTED, SCRIPTS, read_json, run_groups

# Up to 128 devices, in groups of one and of four (whose three learners may not divide the environments evenly).
LAYOUTS = (
    *("a0-l0-d1", "a0-l0,1-d1", "a0-l1-d1", "a0-l1,2-d1", "a0-l1,2,3-d1", "a0,1-l2,3-d1"),
    *(f"a0-l0-d{groups}" for groups in (2, 8, 32, 128)),
    *(f"a0-l1,2,3-d{groups}" for groups in (2, 4, 8, 16, 32)),
)
# The recommendation is searched among these multiples of the flags' actor threads, and of their environments.
FACTORS = (0.5, 1, 2, 4)
# The share of the best speed that counts as equally good.
NEARLY = 0.95
LOOPBACK = 2e-4, 3.3e-10
"""Latency in seconds, and seconds per byte, between processes of a machine, as in doc/benchmarks/cleanba.md."""


@dataclass
class Args(common.OutArgs):
    script: Literal[*DISTRIBUTED] = "cleanba_ppo"
    """distributed script"""
    layouts: tuple[str, ...] = LAYOUTS
    """layouts to predict"""
    check: tuple[str, ...] = ()
    """layouts that are also run here, to check their prediction"""
    check_updates: int = 20
    """updates of each such run"""
    repeats: int = 3
    """measured iterations of each run; the median counts"""
    nvlink_gbytes: float = 200.0
    """GB/s between the GPUs of a machine"""
    network_gbytes: float = 10.0
    """GB/s between machines"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags of the script"""


class Prediction(NamedTuple):
    layout: str
    devices: int
    num_actor_threads: int
    local_num_envs: int
    num_envs: int
    sps: float
    seconds: dict[str, float]
    """seconds of an iteration: rollout, transfer, update, all-reduce"""
    bottleneck: str


# ------------------------------------------------------------------------------------------------------------- PARTS


class Cost(NamedTuple):
    """Wall-clock and core-seconds of a piece of work run alone; for a rollout also its parts' wall-clock seconds."""

    wall: float
    cores: float
    inference: float = 0.0
    emulation: float = 0.0


Measured = tuple[tuple[int, Cost], tuple[int, Cost]]
"""(environments, cost) twice, the smaller number first"""


def cost_of(num_envs: int, measured: Measured) -> Cost:
    """The cost for ``num_envs`` environments, on a straight line through the two that were measured."""
    (n0, c0), (n1, c1) = measured
    weight = (num_envs - n0) / (n1 - n0)
    # Far below both measured sizes, a line through two noisy numbers may fall below 0.
    return Cost(*(max(a + weight * (b - a), 0.2 * a) for a, b in zip(c0, c1, strict=True)))


@dataclass(frozen=True)
class LayoutParts:
    """The measured parts of which layouts of actors and learners are made."""

    rollout: Measured
    """of one actor thread, by its number of environments"""
    update: Measured
    """of a learner, by its number of environments"""
    update_alone: Measured
    """of a learner that is the only process, with the CPU threads that it then gets"""
    update_beside: Measured
    """of one of two learners that update at the same time on this machine, gradient sums excluded"""
    message: tuple[float, float]
    """latency in seconds, and seconds per byte, from process to process"""
    reduction: tuple[float, float]
    """likewise, of a sum over two learners; here the latency includes the wait for the other one"""
    rollout_bytes: int
    """of one environment"""
    params: int
    steps: int
    """optimiser steps of an update"""


def measure_layouts(
    script: str, flags: Sequence[str], args, device: torch.device, num_envs: int, repeats: int, nvlink_gbytes: float
) -> LayoutParts:
    """Measures the parts with short runs of a distributed script, each at two sizes.

    Args:
        flags: of the script; ``args`` were parsed from them.
        num_envs: environments of a learner, divisible into its minibatches; the other size is twice as many.
        repeats: measured iterations; the median counts.
        nvlink_gbytes: GB/s between GPUs; neither it nor LOOPBACK is measured.

    Raises:
        SystemExit: a run failed.
    """
    with closing(make_pool(args.env_id, range(1), args.seed, args.protocol, args.env_backend)) as pool:
        space, action_space = pool.single_observation_space, pool.single_action_space
    agent = importlib.import_module(f"leanrl.{script}").make_agent(space, action_space, args)
    rollout = Rollout.allocate(space, action_space, args.num_steps, 1, torch.device("cpu"))
    threads = threads_alone = args.num_threads or 1
    if device.type == "cpu":
        one_process = Layout((0,), (0,), 1, args.num_actor_threads, args.local_num_envs)
        threads_alone = learner_threads(args, one_process, is_image=space.dtype == np.uint8)
    env_threads = args.env_threads or max(1, available_cores() // args.num_actor_threads)

    def run(learner_envs: int, num_threads: int, learners: str = "0") -> tuple[Cost, Cost, float, int]:
        """Of an iteration: the cost of an actor thread's rollout and of an update, seconds of sums, optimiser steps."""
        local_num_envs = learner_envs * len(learners)
        words = ["--actor-device-ids", "0", "--learner-device-ids", *learners, "--num-actor-threads=1"]
        words += [f"--local-num-envs={local_num_envs}", f"--num-threads={num_threads}", f"--env-threads={env_threads}"]
        words += [f"--{name}=None" for name in ("num-shards", "max-seconds", "target-return", "evaluate-episodes")]
        total_steps = (repeats + 1) * local_num_envs * args.num_steps
        words += ["--policy-lag=0", "--log-frequency=1", f"--total-timesteps={total_steps}"]
        words += ["--no-track", "--no-upload-model"]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(SCRIPTS / f"{script}.py"), *flags, *words]
            run_groups(script, [*command, f"--runs-dir={folder}", "--run-name=run"], 1)
            _, *points = read_metrics(Path(folder, "run"))
            steps = read_json(Path(folder, "run", "summary.json"))["optimizer_steps"] // (repeats + 1)
        names = ("rollout", "inference", "device_to_host", "env_step", "update", "all_reduce")
        playing, inference, copying, emulation, updating, summing = np.median(
            [[point[f"stats/{name}_time"] for name in names] for point in points], axis=0
        ).tolist()
        # Every thread counts as busy, as those of an update are: they spin while they wait.
        play = Cost(playing, playing + (env_threads - 1) * emulation, inference + copying, emulation)
        return play, Cost(updating - summing, (updating - summing) * num_threads), summing, steps

    def measured(runs: Sequence[tuple], part: int) -> Measured:
        return tuple((size, run[part]) for size, run in zip(sizes, runs, strict=True))

    sizes = num_envs, 2 * num_envs
    one = [run(size, threads) for size in sizes]
    alone = one if threads_alone == threads else [run(size, threads_alone) for size in sizes]
    # Two processes on one CPU say nothing about GPUs.
    beside = one if device.type == "cuda" else [run(size, threads, "01") for size in sizes]
    *_, summing, steps = beside[-1]
    nvlink = 20e-6, 1 / (1e9 * nvlink_gbytes)
    return LayoutParts(
        rollout=measured(one, 0),
        update=measured(one, 1),
        update_alone=measured(alone, 1),
        update_beside=measured(beside, 1),
        message=nvlink if device.type == "cuda" else LOOPBACK,
        reduction=nvlink if device.type == "cuda" else (summing / steps, 0.0),
        rollout_bytes=len(rollout.buffer),
        params=sum(parameter.numel() for parameter in agent.parameters()),
        steps=steps,
    )


# --------------------------------------------------------------------------------------------------------- PREDICTION


def layout_of(text: str, script_args) -> Layout:
    """The layout of that name with the script's threads, environments and shards; UsageError if they do not fit."""
    actors, learners, num_groups = parse_layout(text)
    return Layout.of(replace(script_args, actor_device_ids=actors, learner_device_ids=learners), num_groups)


def alternatives(layouts: Sequence[str], module, script_args, cores: int) -> list[tuple[str, object]]:
    """(layout, flags): each layout with FACTORS times as many threads and environments, if the script accepts them."""
    given = script_args.num_actor_threads
    threads = sorted({min(int(factor * given), max(cores, given)) for factor in FACTORS})
    local_num_envs = [int(factor * script_args.local_num_envs) for factor in FACTORS]
    found = []
    for text, num_threads, num_envs in itertools.product(layouts, threads, local_num_envs):
        other = replace(script_args, num_actor_threads=num_threads, local_num_envs=num_envs)
        with suppress(UsageError):
            module.validate_shards(other, layout_of(text, other))
            found.append((text, other))
    return found


def predict(text: str, parts: LayoutParts, script_args, cores: int, machines: int, network_gbytes: float) -> Prediction:
    """The speed of a layout.

    Args:
        cores: of a machine.
        machines: how many the groups are spread over; each group is on one.
    """
    layout = layout_of(text, script_args)
    actors, learners, threads = layout.actor_device_ids, layout.learner_device_ids, layout.num_actor_threads
    groups = math.ceil(layout.num_groups / machines)
    num_threads, num_learners = groups * len(actors) * threads, groups * len(learners)
    if len(layout.members) == 1:
        updates = parts.update_alone
    else:
        updates = parts.update if num_learners == 1 or script_args.device != "cpu" else parts.update_beside
    update = cost_of(layout.num_envs // layout.num_learners, updates)
    play = cost_of(layout.local_num_envs, parts.rollout)
    rollout = max(play.wall, num_threads * play.cores / cores)
    if script_args.device != "cpu":  # the threads of a device share its GPU
        rollout = max(rollout, threads * play.inference)
    updating = max(update.wall, num_learners * update.cores / cores)

    # Every byte that leaves its process; a machine's messages share its memory or its link.
    foreign = sum(
        len(piece.envs)
        for learner in range(len(learners))
        for piece in layout.pieces_of_learner(learner)
        if layout.actor(piece.actor).rank != layout.learner(learner).rank
    )
    latency, per_byte = parts.message
    remote_actors = len([part for part in layout.members if part.learner is None and part.group == 0])
    travel = (latency + per_byte * parts.rollout_bytes * foreign) * groups if foreign else 0.0
    publishing = remote_actors * groups * (latency + per_byte * 4 * parts.params)
    reduction = 0.0
    if (n := layout.num_learners) > 1:
        latency, per_byte = parts.reduction
        if machines > 1:  # a ring is as fast as its slowest link
            per_byte = max(per_byte, 1 / (1e9 * network_gbytes))
        # Rings pass 2 (n - 1) / n of the vector through each link: for n = 2 the whole vector once, as measured.
        reduction = parts.steps * (latency * math.log2(n) + per_byte * 4 * parts.params * 2 * (n - 1) / n)
    seconds = {"rollout": rollout, "transfer": travel + publishing, "update": updating, "all-reduce": reduction}
    work = (num_threads * play.cores + num_learners * update.cores) / cores
    learning = updating + reduction + publishing
    whole = rollout + travel + learning
    apart = not set(actors) & set(learners)
    if script_args.policy_lag not in (0, "newest") and apart:
        # NCCL sends one message after the other: parameters wait for the next rollout.
        whole = max(rollout + travel * (script_args.device != "cpu"), travel, learning, work)
    elif script_args.policy_lag != 0 and (apart or script_args.device == "cpu"):
        whole = max(rollout, travel + learning, work)
    slowest = max(seconds, key=seconds.get)
    if slowest == "rollout":
        slowest = "emulation" if play.emulation > play.inference else "inference"
    sps = layout.num_envs * script_args.num_steps / whole
    sizes = len(layout.members), threads, layout.local_num_envs, layout.num_envs
    return Prediction(text, *sizes, sps, seconds, slowest)


def recommend(predictions: Sequence[Prediction]) -> list[str]:
    """Advice in sentences: actors, learners, threads and environments, for the best speed in all and per device.

    Among those NEARLY as good as the best, it names the one with the fewest environments: with more of them, a run of
    the same number of steps learns in fewer, larger updates.
    """

    def name(what: str, value: Callable[[Prediction], float]) -> str:
        enough = NEARLY * max(map(value, predictions))
        good = (p for p in predictions if value(p) >= enough)
        best = min(good, key=lambda p: (p.num_envs, p.devices, p.num_actor_threads))
        actors, learners, _ = parse_layout(best.layout)
        flags = f"--actor-device-ids {typed(actors)} --learner-device-ids {typed(learners)}"
        flags += f" --num-actor-threads {best.num_actor_threads} --local-num-envs {best.local_num_envs}"
        speed = f"{best.sps:,.0f} steps per second from {best.num_envs:,} environments on {best.devices} device"
        return f"{what}: {best.layout} with `{flags}`, {speed}{'s' * (best.devices > 1)}; bottleneck: {best.bottleneck}"

    return [name("Fastest", lambda p: p.sps), name("Fastest per device", lambda p: p.sps / p.devices)]


# -------------------------------------------------------------------------------------------------------------- CHECK


def run_layout(text: str, args: Args, script_args, folder: Path) -> float:
    """Runs a layout here, all groups on this machine; returns its steps per second. SystemExit if it fails."""
    actors, learners, num_groups = parse_layout(text)
    num_envs = script_args.local_num_envs * script_args.num_actor_threads * len(actors) * num_groups
    total = args.check_updates * num_envs * script_args.num_steps
    command = [sys.executable, str(SCRIPTS / f"{args.script}.py"), *args.script_args, "--no-track", "--no-upload-model"]
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
        row = [p.layout, f"{p.devices}", f"{p.num_envs:,}", *common.rounded([p.sps], p.sps)]
        row += [*(f"{seconds:.3g}" for seconds in p.seconds.values()), p.bottleneck]
        if measured:
            sps = measured.get(p.layout)
            row += ["", ""] if sps is None else [f"{sps:,.0f}", f"{p.sps / sps - 1:+.0%}"]
        rows.append(row)
    return common.markdown_table(header, rows)


def main(args: Args) -> int:
    require_at_least(args, 1, "repeats", "check_updates")
    require_positive(args, "nvlink_gbytes", "network_gbytes")
    module = importlib.import_module(f"leanrl.{args.script}")
    script_args = tyro.cli(module.Args, args=list(args.script_args), prog=args.script)
    module.validate(script_args)
    validate_runtime(script_args)
    device = check_devices(script_args)
    script_args.device = device.type
    layouts, left_out = {}, {}
    for text in dict.fromkeys((*args.check, *args.layouts)):
        parse_layout(text)  # anything that is not a layout is refused, whatever the flags
        try:
            layout = layout_of(text, script_args)
            module.validate_shards(script_args, layout)
            layouts[text] = layout
        except UsageError as error:
            if text in args.check:
                raise
            left_out[text] = str(error)
    if not layouts:
        raise bad("layouts", args.layouts, f"none fits the script's flags ({'; '.join(set(left_out.values()))})")

    out = common.results_folder(args, "plan_layout")
    print("measuring the parts", flush=True)
    cores = available_cores()
    learner_envs = min(layout.num_envs // layout.num_learners for layout in layouts.values())
    what = args.script, args.script_args, script_args, device
    parts = measure_layouts(*what, learner_envs, args.repeats, args.nvlink_gbytes)

    def speed(text: str, flags) -> Prediction:
        machines = 1 if text in args.check else layouts[text].num_groups
        return predict(text, parts, flags, cores, machines, args.network_gbytes)

    predictions = [speed(text, script_args) for text in layouts]
    advice = recommend([speed(*plan) for plan in alternatives(layouts, module, script_args, cores)])
    measured, folder = {}, out / "runs" / time.strftime("%Y%m%d-%H%M%S")
    for text in args.check:
        print(f"running {text}", flush=True)
        measured[text] = run_layout(text, args, script_args, folder)
    record = {**common.benchmark_record("plan_layout", device), "parts": asdict(parts), "measured": measured}
    record["predictions"] = [prediction._asdict() for prediction in predictions]
    record |= {"left_out": left_out, "advice": advice}
    text = f"{args.script}, {script_args.env_id}, {common.describe_machine(record['machine'])}\n\n"
    text += "\n".join([render(predictions, measured), "", *(f"- {line}" for line in advice)])
    if left_out:
        text += "\n".join(["\n\nLeft out:\n", *(f"- {name}: {reason}" for name, reason in left_out.items())])
    common.write_results(out, "plan_layout", record, text)
    return 0


if __name__ == "__main__":
    common.run_tool(main, Args)
