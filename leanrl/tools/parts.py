"""Where the time of one environment step goes: matrix products, fused loops, the environment, and what is left.

Each script runs in a process of its own, three times: plainly, for its speed; under PyTorch's profiler, for its parts;
and eagerly under its counter of floating-point operations. The floor of the matrix products is those operations at the
speed that a large product reaches here (float32, or bfloat16 with --amp bf16). The profiler lengthens what it looks at,
mostly the many short parts: the speed beside it shows by how much. On a GPU the parts but for the environment are the
times of kernels, and what is left is the wall clock less all of these: too little where kernels run beside each other
or while the environment steps.

    python -m leanrl.tools.parts
    python -m leanrl.tools.parts --scripts sac_continuous_action_torchcompile:compile -- --amp bf16
"""

import importlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from leanrl.support.devices import available_cores, resolve_device
from leanrl.support.errors import UsageError, require_at_least
from leanrl.support.executables import CPU_OPTIONS
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
from leanrl.tools.trials import LEVERS, Deadline, check_script_args, contenders_of, parse_entry, target_device

KINDS = {
    "environment": ("env.step",),
    # Before the products: TorchInductor names its loops after what they are fused with, as in triton_poi_fused_addmm.
    "fused loops": ("cpp_fused", "triton_"),
    "matrix products": ("bmm", "addmm", "::mm", "_mm_out", "cpu_mm", "gemm", "gemv", "nvjet", "cutlass", "splitK"),
    "random numbers": ("rand", "normal_", "random_", "distribution"),
    "copies": ("copy_", "clone", "empty", "index_select", "index_copy", "cumsum", "Memcpy", "Memset", "CatArray"),
}
"""Part -> what the names of its events contain, the first that fits; all other time is `calls and Python`."""

OTHER_KERNELS = "other kernels"
"""A GPU's, which fit none of KINDS: mostly the loops of eager PyTorch."""

REST = "calls and Python"


@dataclass
class Args:
    scripts: tuple[str, ...] = (
        "td3_continuous_action_torchcompile:compile",
        "sac_continuous_action_torchcompile:compile",
    )
    """SCRIPT:MODE each; MODE is eager, compile, cudagraphs, compile+one-graph ..."""
    steps: int = 1000
    """environment steps with an update, of which the parts are the mean; on-policy scripts take whole rollouts"""
    learning_starts: int = 1000
    """environment steps before them, of off-policy scripts"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results; by default RUNS_DIR/parts/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every script"""


def main(args: Args) -> int:
    require_at_least(args, 10, "steps")
    require_at_least(args, 0, "learning_starts")
    check_script_args(args.script_args, reserved=("--learning-starts", "--log-every"))
    device = target_device(args.script_args)
    contenders_of(args.scripts, "scripts", device)  # refuses what cannot run
    for entry in args.scripts:
        command(entry, args)
    out = results_folder(args, "parts")
    rows = [measure(entry, args) for entry in args.scripts]
    record = {**benchmark_record("parts", device), "rows": rows}
    text = f"{describe_machine(record['machine'])}\n\n{render_table(rows)}"
    write_results(out, "parts", record, text, draw(rows))
    return 0


def measure(entry: str, args: Args) -> dict:
    """One row: microseconds of an environment step by part, its speed without the profiler, and the floor."""
    script, flags, mode = command(entry, args)
    row = take_apart(entry, args)
    plain = in_process(observe_run, script, [*flags, *mode], "speed")
    counted = in_process(observe_run, script, flags, "flops")
    print(f"{row['who']}: {1e6 / plain['sps']:,.0f} us a step", flush=True)
    return {
        **row,
        "step_us": 1e6 / plain["sps"],
        "mflop": counted["mflop"],
        "product_gflops": counted["product_gflops"],
        "floor_us": 1e3 * counted["mflop"] / counted["product_gflops"],
    }


def take_apart(entry: str, args: Args, deadline: Deadline | None = None) -> dict:
    """Only the parts of such a row: a third of the time that ``measure`` takes; SystemExit after ``deadline``."""
    script, flags, mode = command(entry, args)
    profiled = in_process(observe_run, script, [*flags, *mode], "parts", deadline=deadline)
    return {
        "who": " ".join([script, *mode, *args.script_args]),
        "profiled_step_us": 1e6 / profiled["sps"],
        "parts_us": profiled["parts_us"],
    }


def command(entry: str, args: Args) -> tuple[str, list[str], list[str]]:
    """What runs for ``SCRIPT:MODE``: the script, its flags, and those of the mode."""
    script, levers = parse_entry(entry, "scripts")
    if "envpool" in script or script.startswith("cleanba_"):
        raise UsageError(f"--scripts {entry}: cannot be taken apart here; see leanrl.tools.parts_atari for Atari")
    script_args = importlib.import_module(f"leanrl.{script}").Args
    if hasattr(script_args, "learning_starts"):
        flags = [f"--learning-starts={args.learning_starts}", "--log-every=1000000"]
        num_steps = args.learning_starts + args.steps
    else:  # whole rollouts, each with its updates
        flags, num_steps = [], math.ceil(args.steps / script_args.num_steps) * script_args.num_steps
    flags += [*args.script_args, f"--total-timesteps={num_steps}"]
    return script, flags, [f"--{lever}" for lever in LEVERS if lever in (levers or ())]


# ---------------------------------------------------------------------------------------------------- IN A PROCESS


def in_process(fn: Callable, *args, deadline: Deadline | None = None) -> dict:
    """What ``fn(*args)`` returns, in a fresh process: compiled code and threads must not carry over.

    Raises:
        SystemExit: it failed, with its exit code; or took longer than ``deadline``.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        process = multiprocessing.get_context("spawn").Process(target=write_result, args=(result, fn, *args))
        process.start()
        try:
            process.join(deadline and max(0.0, deadline.seconds_left))
            if process.is_alive():
                raise SystemExit("the time was up")
        finally:
            process.kill()
            process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
        return json.loads(result.read_text())


def write_result(path: Path, fn: Callable, *args) -> None:
    """Writes what ``fn(*args)`` returns as JSON; bad input is one line and exit code 2."""
    try:
        path.write_text(json.dumps(fn(*args)))
    except UsageError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def observe_run(script: str, flags: list[str], what: str) -> dict:
    """Runs ``script`` and watches it from the last start of its clock to its end; returns what it found."""
    # Kineto's second session in a process may find no kernels where the first one has torn CUPTI down.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    module = importlib.import_module(f"leanrl.{script}")
    found, watch = {}, ExitStack()

    class WatchedRun(Run):
        """A run that is watched while its clock runs."""

        def start_clock(self) -> None:
            watch.close()
            # Nothing before its last start is watched: CUDA 13's profiler may lose the kernels of a second session.
            if self.global_step >= getattr(self.args, "learning_starts", 0):
                found["watched"] = watch.enter_context(watchers[what]())
            super().start_clock()

        def finish(self, *args, **kwargs) -> dict:
            found["steps"] = self.global_step - self._clock_start[1]
            found["seconds"] = time.perf_counter() - self._clock_start[0]
            found["sps"] = self.sps()
            watch.close()
            return super().finish(*args, **kwargs)

    watchers = {"speed": ExitStack, "parts": profiler, "flops": flop_counter}
    module.Run = WatchedRun
    module.make_envs = recorded(module.make_envs)
    if what == "parts":
        CPU_OPTIONS["cpp.enable_kernel_profile"] = True
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        args = tyro.cli(module.Args, args=[*flags, "--runs-dir", folder, "--run-name", "run"])
        module.main(args)
    content = {"sps": found["sps"]}
    if what == "parts":
        content["parts_us"] = by_part(found["watched"], found["steps"], found["seconds"], resolve_device(args).type)
    if what == "flops":
        content["mflop"] = found["watched"].get_total_flops() / 1e6 / found["steps"]
        content["product_gflops"] = product_gflops(torch.bfloat16 if args.amp == "bf16" else torch.float32, args.device)
    return content


def recorded(make_envs: Callable) -> Callable:
    """``make_envs``, whose environments mark for the profiler when they step."""

    def make_recorded_envs(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        step = envs.step

        def recorded_step(actions):
            with torch.profiler.record_function("env.step"):
                return step(actions)

        envs.step = recorded_step
        return envs

    return make_recorded_envs


def profiler():
    """PyTorch's profiler for this machine's devices."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def flop_counter():
    """Counts the operations of matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


def by_part(profile: torch.profiler.profile, steps: int, seconds: float, device_type: str) -> dict[str, float]:
    """Microseconds of a step in each of KINDS, on a GPU in other kernels too, and the rest.

    Raises:
        SystemExit: no kernel of a GPU is in the profile.
    """
    on_gpu = device_type == "cuda"
    parts = dict.fromkeys([*KINDS, OTHER_KERNELS] if on_gpu else KINDS, 0.0)
    for event in profile.key_averages():
        on_cpu = event.device_type == torch.autograd.DeviceType.CPU
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), None)
        if kind == "environment":
            if on_cpu:  # its time is all that happens within it
                parts[kind] += event.cpu_time_total / steps
        elif on_gpu and not on_cpu:  # PyTorch's calls are reported with the time of the kernels that they start
            parts[kind or OTHER_KERNELS] += event.self_device_time_total / steps
        elif kind is not None and not on_gpu:
            parts[kind] += event.self_cpu_time_total / steps
    if on_gpu and sum(parts.values()) == parts["environment"]:
        raise SystemExit("the profiler saw no kernel")
    parts[REST] = max(0.0, 1e6 * seconds / steps - sum(parts.values()))
    return parts


def product_gflops(dtype: torch.dtype, device: str, tf32: bool = False) -> float:
    """Operations per nanosecond of matrix products, as large as it takes to keep all cores busy.

    Args:
        tf32: on a GPU, float32 products as PyTorch's convolutions compute them by default.
    """
    device = "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    torch.set_num_threads(available_cores())
    size, calls = (8192, 3) if device.startswith("cuda") else (256, 50)
    x, y = torch.randn(2, 2, size, size, device=device).to(dtype)
    matmul, best = torch.backends.cuda.matmul, math.inf
    precision = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if tf32 else precision
    for _ in range(20):
        synchronize(torch.device(device))
        start = time.perf_counter()
        for _ in range(calls):
            torch.bmm(x, y)
        synchronize(torch.device(device))
        best = min(best, (time.perf_counter() - start) / calls)
    matmul.fp32_precision = precision
    return 2 * 2 * size**3 / best / 1e9


# ------------------------------------------------------------------------------------------------------------ RESULTS


def render_table(rows: Sequence[dict]) -> str:
    """Microseconds of an environment step."""
    kinds = kinds_of(rows)
    numbers = {"step_us": "step", "profiled_step_us": "step, profiled"}
    floors = {"mflop": "MFLOP", "floor_us": "floor of the products"}

    def cells_of(row: dict, keys: Iterable[str]) -> list[str]:
        return [f"{row[key]:,.0f}" if key in row else "-" for key in keys]

    header = ("program", *numbers.values(), *kinds, *floors.values())
    cells = [
        (row["who"], *cells_of(row, numbers), *cells_of(row["parts_us"], kinds), *cells_of(row, floors)) for row in rows
    ]
    legend = "Microseconds of an environment step; the parts are those of the profiled one."
    return f"{markdown_table(header, cells)}\n\n{legend}"


def kinds_of(rows: Sequence[dict]) -> list[str]:
    """The parts in the order of the columns."""
    others = [OTHER_KERNELS] if any(OTHER_KERNELS in row["parts_us"] for row in rows) else []
    return [*KINDS, *others, REST]


def draw(rows: Sequence[dict]):
    """A stacked bar a row, its unprofiled length and its floor marked where they are known."""
    figure = new_figure(11, 1.8 + 0.9 * len(rows))
    axes = figure.subplots()
    for i, row in enumerate(rows):
        start = 0.0
        for kind, color in zip(kinds_of(rows), COLORS[1:], strict=False):
            axes.barh(i, row["parts_us"][kind], left=start, height=0.42, color=color, label=kind if i == 0 else None)
            start += row["parts_us"][kind]
        axes.text(0, i - 0.27, row["who"], va="bottom", fontsize=10)
        for key, label, style in (("step_us", "step, not profiled", "-"), ("floor_us", "floor of the products", ":")):
            if key in row:
                line = {"color": "black", "linestyle": style, "label": label if i == 0 else None}
                axes.plot([row[key]] * 2, [i - 0.26, i + 0.26], **line)
    axes.set_ylim(len(rows) - 0.55, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)  # the rows' names begin there
    axes.set_title("Microseconds of an environment step, under the profiler", loc="left")
    clean(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    run_tool(main, Args)
