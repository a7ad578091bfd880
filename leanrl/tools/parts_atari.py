"""Where the time of an Atari step goes (emulation, inference, update, the rest), and what is left of EnvPool's speed.

Each script runs in a process of its own with each number of environments; the time is taken around what it calls.
EnvPool alone, stepped with random actions in the same way, is the floor of the emulation; the network's operations at
the speed of a large matrix product (bfloat16 with --amp bf16) are the floors of inference and update. What emulates
while something else is computed (--num-env-groups) costs only what is waited for.

    python -m leanrl.tools.parts_atari
    python -m leanrl.tools.parts_atari --num-envs 8 32 128 -- --amp bf16
"""

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import tyro

import leanrl.ppo_atari_envpool as reference
from leanrl.support.atari import PROTOCOLS, AtariVectorEnv, make_atari_envs
from leanrl.support.envs import EnvPoolVectorEnv
from leanrl.support.errors import UsageError, bad, require_at_least
from leanrl.support.run import Run, synchronize
from leanrl.tools.common import (
    COLORS,
    benchmark_record,
    clean,
    describe_machine,
    markdown_table,
    new_figure,
    results_folder,
    run_tool,
    write_results,
)
from leanrl.tools.parts import flop_counter, in_process, product_gflops
from leanrl.tools.trials import (
    LEVERS,
    Deadline,
    check_script_args,
    contenders_of,
    parse_entry,
    require_distinct,
    target_device,
)

PARTS = ("emulation", "inference", "update")
REST = "copies and Python"
"""All other time: targets, statistics, log points."""

ALONE_SECONDS = 3.0


@dataclass
class Args:
    scripts: tuple[str, ...] = (
        "ppo_atari_envpool:eager",
        "ppo_atari_envpool_torchcompile:eager",
        "ppo_atari_envpool_torchcompile:compile",
    )
    """SCRIPT:MODE each; MODE is eager, compile, cudagraphs, compile+one-graph ..."""
    num_envs: tuple[int, ...] = (8,)
    """environments stepped together, a row of each script for each"""
    env_id: str = "Breakout-v5"
    """the game"""
    iterations: int = 10
    """rollouts with their updates, of which the parts are the mean; a reference's first one is left out"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results; by default RUNS_DIR/parts_atari/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every script"""


def main(args: Args) -> int:
    require_distinct(args, "scripts", "num_envs")
    require_at_least(args, 1, "iterations")
    for num_envs in args.num_envs:
        if num_envs < 1:
            raise bad("num_envs", num_envs, "must be at least 1")
    check_script_args(args.script_args, reserved=("--num-envs", "--env-id"))
    device = target_device(args.script_args)
    contenders_of(args.scripts, "scripts", device)  # refuses what cannot run
    for entry in args.scripts:
        if not parse_entry(entry, "scripts")[0].startswith("ppo_atari"):
            raise UsageError(f"--scripts {entry}: is not PPO on Atari; see leanrl.tools.parts for others")
    make_atari_envs(args.env_id, 1, 0).close()  # refuses what is no game
    out = results_folder(args, "parts_atari")
    rows = []
    for num_envs in args.num_envs:
        alone = in_process(envpool_alone, args.env_id, num_envs)["sps"]
        print(f"EnvPool alone, {num_envs} environments: {alone:,.0f} steps/s", flush=True)
        for entry in args.scripts:
            rows.append(measure(entry, args.env_id, num_envs, args.iterations, args.script_args, alone))
            print(f"{rows[-1]['who']}, {num_envs} environments: {rows[-1]['sps']:,.0f} steps/s", flush=True)
    record = {**benchmark_record("parts_atari", device), "env_id": args.env_id, "rows": rows}
    text = f"{args.env_id}, {describe_machine(record['machine'])}\n\n{render_table(rows)}"
    write_results(out, "parts_atari", record, text, draw(rows))
    return 0


def measure(
    entry: str,
    env_id: str,
    num_envs: int,
    iterations: int,
    script_args: Sequence[str],
    envpool_sps: float,
    deadline: Deadline | None = None,
) -> dict:
    """One row: the speed of ``SCRIPT:MODE``, microseconds of a step by part, and their floors.

    Raises:
        SystemExit: the script failed, or took longer than ``deadline``.
    """
    script, levers = parse_entry(entry, "scripts")
    mode = [f"--{lever}" for lever in LEVERS if lever in (levers or ())]
    flags = [f"--env-id={env_id}", f"--num-envs={num_envs}", *script_args, *mode]
    row = in_process(observe_run, script, flags, iterations, deadline=deadline)
    row["floors_us"]["emulation"] = 1e6 / envpool_sps
    return {"who": " ".join([script, *mode, *script_args]), "num_envs": num_envs, "envpool_sps": envpool_sps, **row}


# ---------------------------------------------------------------------------------------------------- IN A PROCESS


def envpool_alone(env_id: str, num_envs: int, protocol: str = "cleanrl", num_threads: int = 0) -> dict:
    """Steps per second of one pool that gets random actions.

    Args:
        protocol: a key of PROTOCOLS.
        num_threads: of EnvPool; 0 for its own choice.
    """
    envs = make_atari_envs(env_id, num_envs, 1, PROTOCOLS[protocol], num_threads=num_threads)
    actions = np.random.default_rng(0).integers(0, envs.single_action_space.n, (1000, num_envs))
    envs.reset()
    for action in actions[:20]:
        envs.step(action)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() < start + ALONE_SECONDS:
        envs.step(actions[steps % len(actions)])
        steps += 1
    return {"sps": steps * num_envs / (time.perf_counter() - start)}


def observe_run(script: str, flags: list[str], iterations: int) -> dict:
    """Runs ``script`` for so many rollouts; its speed, and microseconds of a step in each part, with their floors."""
    module = importlib.import_module(f"leanrl.{script}")
    seconds, found = dict.fromkeys(PARTS, 0.0), {}
    args = tyro.cli(module.Args, args=flags)
    args.total_timesteps = iterations * args.num_envs * args.num_steps
    device = target_device([f"--device={args.device}"])

    def timed(part: str, fn: Callable) -> Callable:
        def call(*args):
            synchronize(device)
            start = time.perf_counter()
            result = fn(*args)
            synchronize(device)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    class WatchedRun(Run):
        """A run whose parts are counted while its clock runs."""

        def start_clock(self) -> None:
            super().start_clock()
            seconds.update(dict.fromkeys(PARTS, 0.0))

        def finish(self, *args, **kwargs) -> dict:
            found["sps"] = self.sps()
            steps = self.global_step - self._clock_start[1]
            found["parts_us"] = {part: 1e6 * s / steps for part, s in seconds.items()}
            found["parts_us"][REST] = 1e6 / found["sps"] - sum(found["parts_us"].values())
            return super().finish(*args, **kwargs)

    module.Run = WatchedRun
    EnvPoolVectorEnv.send = timed("emulation", EnvPoolVectorEnv.send)
    AtariVectorEnv.recv = timed("emulation", AtariVectorEnv.recv)
    if hasattr(module, "make_executables"):
        make_executables = module.make_executables

        def make_timed_executables(*args):
            act, train = make_executables(*args)
            return timed("inference", act), timed("update", train)

        module.make_executables = make_timed_executables
    else:
        module.policy_step = timed("inference", module.policy_step)
        module.train_epoch = timed("update", module.train_epoch)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        args.runs_dir, args.run_name = folder, "run"
        module.main(args)
    return {**found, "floors_us": floors(args)}


def floors(args) -> dict[str, float]:
    """Microseconds per step that the network's operations of inference and update would take at full speed."""
    agent = reference.Agent(6)
    obs = torch.zeros(8, 4, 84, 84, dtype=torch.uint8)
    mflop = []
    for with_gradient in (False, True):
        with flop_counter() as counter, torch.set_grad_enabled(with_gradient):
            probs, value = agent(obs)
            if with_gradient:
                torch.autograd.grad(probs.logits.sum() + value.sum(), list(agent.parameters()))
        mflop.append(counter.get_total_flops() / 1e6 / len(obs))
    gflops = product_gflops(torch.bfloat16 if args.amp == "bf16" else torch.float32, args.device, tf32=True)
    return {"inference": 1e3 * mflop[0] / gflops, "update": 1e3 * args.update_epochs * mflop[1] / gflops}


# ------------------------------------------------------------------------------------------------------------ RESULTS


def render_table(rows: Sequence[dict]) -> str:
    """Microseconds per environment step, and the part of EnvPool's speed that is left."""
    header = ("program", "environments", "sps", "EnvPool alone", "kept", *PARTS, REST, "floors")
    cells = [
        (
            row["who"],
            f"{row['num_envs']}",
            f"{row['sps']:,.0f}",
            f"{row['envpool_sps']:,.0f}",
            f"{row['sps'] / row['envpool_sps']:.0%}",
            *(f"{row['parts_us'][part]:,.0f}" for part in (*PARTS, REST)),
            " + ".join(f"{row['floors_us'][part]:,.0f}" for part in PARTS),
        )
        for row in rows
    ]
    legend = "Parts and floors (of emulation + inference + update) in microseconds per environment step."
    return f"{markdown_table(header, cells)}\n\n{legend}"


def draw(rows: Sequence[dict]):
    """Two stacked bars a row: the parts, and thinner below them their floors."""
    figure = new_figure(11, 1.8 + 0.9 * len(rows))
    axes = figure.subplots()
    for i, row in enumerate(rows):
        for values, y, height, alpha in ((row["parts_us"], i, 0.36, 1.0), (row["floors_us"], i + 0.26, 0.12, 0.5)):
            start = 0.0
            for part, color in zip((*PARTS, REST), COLORS[1:], strict=False):
                label = (part if alpha == 1.0 else f"{part}, floor") if i == 0 and part in values else None
                length = values.get(part, 0.0)
                axes.barh(y, length, left=start, height=height, color=color, alpha=alpha, label=label)
                start += length
        axes.text(0, i - 0.22, f"{row['who']}, {row['num_envs']} environments", va="bottom", fontsize=10)
    axes.set_ylim(len(rows) - 0.55, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)  # the rows' names begin there
    axes.set_title("Microseconds per environment step", loc="left")
    clean(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    run_tool(main, Args)
