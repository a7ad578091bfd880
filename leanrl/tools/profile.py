"""Where the time of an environment step goes, and what this machine could do at best.

Each SCRIPT[:MODE] runs unchanged in a process of its own, and is watched from the last start of its clock to its end:
once as it is, for its speed, and once under PyTorch's profiler, which slows down mostly the many short pieces; both
step times show by how much. On a GPU all pieces but the environment are kernels, and the rest is the wall clock
minus all of them: too little if kernels run at the same time or while the environment steps.

The floors are the script's environments alone, with random actions, and the operations of its products and convolutions
(counted in a third run, in eager mode) at the speed of a large product (bfloat16 with --amp bf16). Emulation that runs
while something else is computed (--num-env-groups) counts only as far as it is waited for.

    python -m leanrl.tools.profile td3_continuous_action_torchcompile:compile -- --amp bf16
    python -m leanrl.tools.profile --steps 10240 ppo_atari_envpool "ppo_atari_envpool_torchcompile:compile --num-envs 8"

Flags of this tool come before the scripts, flags of one script in quotes with it, flags of all after --.
"""

import importlib
import itertools
import math
import multiprocessing
import os
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Annotated
from unittest.mock import patch

import torch
import tyro

from leanrl.support.devices import available_cores, resolve_device, synchronize_stream
from leanrl.support.errors import UsageError, require_at_least
from leanrl.support.executables import CPU_OPTIONS
from leanrl.support.run import Run
from leanrl.tools import common, trials

KINDS = {
    "environment": "env.step",
    # Before the products, as TorchInductor names its loops after what they are fused with: triton_poi_fused_addmm.
    "fused loops": "cpp_fused triton_",
    "matrix products": "bmm addmm ::mm _mm_out cpu_mm gemm gemv nvjet cutlass splitK conv cudnn xmma",
    "random numbers": "rand normal_ random_ distribution",
    "copies": "copy_ clone empty index_select index_copy cumsum Memcpy Memset CatArray",
}
"""Kind -> substrings of the names of its events in the profile; the first match counts. Convolutions are products."""

OTHER_KERNELS = "other kernels"
"""Kernels of a GPU that match none of KINDS: mostly the loops of eager PyTorch."""

REST = "calls and Python"
"""All other time."""

COLUMNS = {
    **{"who": "program", "num_envs": "environments", "step_us": "step", "profiled_step_us": "step, profiled"},
    **{part: part for part in (*KINDS, OTHER_KERNELS, REST)},
    **{"mflop": "MFLOP", "floor_us": "floor of the products", "envs_us": "environments alone"},
}
"""Key of a row -> the column that shows it."""

ALONE_SECONDS = 3.0
"""for how long the environments alone are timed"""


@dataclass
class Args(common.OutArgs):
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SCRIPT[:MODE] ... -- FLAGS")] = ()
    """what is measured; MODE is eager, compile, cudagraphs, compile+one-graph ..."""
    steps: int = 1000
    """environment steps that the results average over. Off-policy scripts take 1,000 random steps first; on-policy
    scripts play whole rollouts, and references one more rollout first"""

    @property
    def scripts(self) -> tuple[str, ...]:
        return tuple(itertools.takewhile(lambda word: not word.startswith("-"), self.words))

    @property
    def script_args(self) -> tuple[str, ...]:
        return self.words[len(self.scripts) :]


def main(args: Args) -> int:
    require_at_least(args, 10, "steps")
    if not args.scripts:
        raise UsageError("name scripts: SCRIPT[:MODE] ... [-- FLAGS]")
    contenders = [contender_of(entry, args.script_args) for entry in args.scripts]
    out = common.results_folder(args, "profile")
    rows = []
    for contender in contenders:
        print(f"profiling {contender.label}", flush=True)
        module, flags = trials.script_and_flags(contender)
        row = in_process(take_apart, module.__name__.rpartition(".")[2], flags, args.steps)
        rows.append({"who": " ".join([contender.label, *args.script_args]), **row})
    record = {**common.benchmark_record("profile", trials.target_device(args.script_args)), "rows": rows}
    text = f"{common.describe_machine(record['machine'])}\n\n{render(record)}"
    common.write_results(out, "profile", record, text, draw(record))
    return 0


def contender_of(entry: str, flags: Sequence[str]) -> trials.Contender:
    """The contender for ``SCRIPT[:MODE]``, with its own flags in ``entry``. UsageError if it cannot run."""
    for words in (flags, entry.split()[1:]):
        trials.check_flags(words)
    if entry.startswith(tuple(trials.DISTRIBUTED)):
        raise UsageError(f"{entry}: distributed runs already log the times of their parts, as stats/ in metrics.jsonl")
    try:
        contender, *others = trials.contenders_of([entry], "scripts", trials.target_device(flags), flags)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("--scripts ")) from None
    if others or trials.peer_of(contender.label):
        raise UsageError(f"{entry}: must be one mode of a script, as in td3_continuous_action_torchcompile:compile")
    trials.require_valid(contender)
    return contender


# ---------------------------------------------------------------------------------------------------- IN A PROCESS


def in_process(fn: Callable, *args):
    """Calls ``fn(*args)`` in a fresh process: compiled code and threads must not carry over."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(fn, *args)
        try:
            return future.result()
        finally:
            if not future.done():  # nobody waits for it any longer
                for process in multiprocessing.active_children():
                    process.kill()


def take_apart(script: str, flags: Sequence[str], steps: int) -> dict:
    """Everything in a row but its name."""
    plain, profiled = (watch(script, flags, steps, how) for how in ("plainly", "profiled"))
    # In eager mode, which shows all operations; a few steps are enough to count them.
    modes = {flag for mode in trials.MODES for flag in trials.flags_of(mode)}
    counted = watch(script, [flag for flag in flags if flag not in modes], min(steps, 1000), "counted")
    gflops = product_gflops(plain["args"], tf32=plain["on_images"])
    return {
        "num_envs": plain["args"].num_envs,
        "step_us": 1e6 / plain["sps"],
        "profiled_step_us": 1e6 / profiled["sps"],
        "parts_us": profiled["parts_us"],
        "mflop": counted["mflop"],
        "product_gflops": gflops,
        "floor_us": 1e3 * counted["mflop"] / gflops,
        "envs_us": 1e6 / plain["envs_sps"],
    }


def watch(script: str, flags: Sequence[str], steps: int, how: str) -> dict:
    """Runs ``script`` and watches it from the last start of its clock to its end.

    Args:
        how: ``plainly``, ``profiled``, or with its operations ``counted``.

    Returns:
        its ``args``, whether its environments show images (``on_images``), and its ``sps``. Plainly also ``envs_sps``,
        of the environments alone; profiled ``parts_us``, microseconds of a step by kind; counted ``mflop``, operations
        of a step.
    """
    from torch.utils.flop_counter import FlopCounterMode

    # A second Kineto session in a process may find no kernels if the first one has torn down CUPTI.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    watchers = {"plainly": nullcontext, "profiled": torch.profiler.profile}
    watcher = watchers[how]() if how in watchers else FlopCounterMode(display=False)
    module = importlib.import_module(f"leanrl.{script}")
    on_images, off_policy = hasattr(module, "make_atari_envs"), hasattr(module.Args, "learning_starts")
    args = tyro.cli(module.Args, args=["--learning-starts=1000", *flags] if off_policy else flags)
    batch_size = args.num_envs * getattr(args, "num_steps", 1)
    # Where the clock starts for the last time: a reference first plays one rollout.
    first_step = args.learning_starts if off_policy else 0 if hasattr(args, "compile") else batch_size
    args.total_timesteps = first_step + math.ceil(steps / batch_size) * batch_size
    session, found = ExitStack(), {"args": args, "on_images": on_images}

    class WatchedRun(Run):
        """A run that is watched while its clock runs."""

        def start_clock(self) -> None:
            # Only what follows its last start is watched: CUDA 13's profiler may lose the kernels of a second session.
            session.close()
            if self.global_step >= first_step:
                session.enter_context(watcher)
            super().start_clock()

        def finish(self, *args, **kwargs) -> dict:
            found.update(sps=self.sps(), steps=self.global_step - self._clock_start[1])
            session.close()
            return super().finish(*args, **kwargs)

    def make_watched_envs(env_id, num_envs, *rest, **options):
        envs = make_envs(env_id, num_envs, *rest, **options)
        for name in ("send", "recv") if hasattr(envs, "send") else ("step",):
            setattr(envs, name, torch.profiler.record_function("env.step")(getattr(envs, name)))
        # All of them, also where these are one group.
        found["alone"] = lambda: sps_alone(make_envs(env_id, args.num_envs, *rest, **options))
        return envs

    name = "make_atari_envs" if on_images else "make_envs"
    make_envs = getattr(module, name)
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(module, **{"Run": WatchedRun, name: make_watched_envs}))
        options = {"cpp.enable_kernel_profile": True} if how == "profiled" else {}
        stack.enter_context(patch.dict(CPU_OPTIONS, options))
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        args.runs_dir, args.run_name = stack.enter_context(tempfile.TemporaryDirectory()), "run"
        module.main(args)
    if how == "profiled":
        found["parts_us"] = by_kind(watcher, found["steps"], 1e6 / found["sps"], resolve_device(args).type)
    elif how == "counted":
        found["mflop"] = watcher.get_total_flops() / found["steps"] / 1e6
    else:
        found["envs_sps"] = found["alone"]()
    return found


def by_kind(profile: torch.profiler.profile, steps: int, step_us: float, device_type: str) -> dict[str, float]:
    """Microseconds of a step by kind (KINDS, on a GPU also other kernels), and the rest of ``step_us``.

    Raises:
        RuntimeError: the profile has no kernel of the GPU.
    """
    on_gpu = device_type == "cuda"
    parts = dict.fromkeys([*KINDS, OTHER_KERNELS] if on_gpu else KINDS, 0.0)
    for event in profile.key_averages():
        on_cpu = event.device_type == torch.autograd.DeviceType.CPU
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names.split())), None)
        if kind == "environment":
            if on_cpu:  # its time includes everything within it
                parts[kind] += event.cpu_time_total / steps
        elif on_gpu and not on_cpu and not event.is_user_annotation:  # calls and spans would count their kernels again
            parts[kind or OTHER_KERNELS] += event.self_device_time_total / steps
        elif kind is not None and not on_gpu:
            parts[kind] += event.self_cpu_time_total / steps
    if on_gpu and sum(parts.values()) == parts["environment"]:
        raise RuntimeError("the profiler saw no kernel")
    return {**parts, REST: max(0.0, step_us - sum(parts.values()))}


def product_gflops(args, tf32: bool) -> float:
    """Operations per nanosecond of a large matrix product on all cores, in the precision of a script's ``args``.

    Args:
        tf32: on a GPU, compute float32 products in TF32, as PyTorch's convolutions do by default.
    """
    device, matmul = resolve_device(args), torch.backends.cuda.matmul
    torch.set_num_threads(available_cores())
    size, calls = (8192, 3) if device.type == "cuda" else (256, 50)
    dtype = torch.bfloat16 if args.amp == "bf16" else torch.float32
    x, y = torch.randn(2, 2, size, size, device=device).to(dtype)
    precision, matmul.fp32_precision = matmul.fp32_precision, "tf32" if tf32 else matmul.fp32_precision

    def products() -> None:
        for _ in range(calls):
            torch.bmm(x, y)
        synchronize_stream(device)

    seconds = min(timeit.repeat(products, repeat=20, number=1)) / calls
    matmul.fp32_precision = precision
    return 2 * 2 * size**3 / seconds / 1e9


def sps_alone(envs) -> float:
    """Steps per second of environments alone, with random actions."""
    with closing(envs):
        actions = itertools.cycle([envs.action_space.sample() for _ in range(1000)])
        envs.reset()
        for _ in range(20):
            envs.step(next(actions))
        steps, start = 0, time.perf_counter()
        while time.perf_counter() < start + ALONE_SECONDS:
            envs.step(next(actions))
            steps += envs.num_envs
        return steps / (time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------------------ RESULTS


def render(record: dict) -> str:
    """A table of the record's ``rows``."""
    rows = [{**row, **row["parts_us"]} for row in record["rows"]]
    columns = [key for key in COLUMNS if any(key in row for row in rows)]

    def cell(x: float | int | str) -> str:
        if isinstance(x, str):
            return x
        return common.rounded([x], max(x, 10))[0] if isinstance(x, float) else f"{x:,}"

    cells = [[cell(row.get(key, "-")) for key in columns] for row in rows]
    legend = "Microseconds of an environment step; the parts are those of the profiled one."
    return f"{common.markdown_table([COLUMNS[key] for key in columns], cells)}\n\n{legend}"


def draw(record: dict):
    """A stacked bar per row, a line at the length of the step without the profiler, and its floors in the bar."""
    from matplotlib import colormaps

    rows = record["rows"]
    figure = common.new_figure(11, 1.8 + 0.9 * len(rows))
    axes, handles = figure.subplots(), {}
    parts = [part for part in COLUMNS if any(part in row["parts_us"] for row in rows)]
    for i, row in enumerate(rows):
        starts, start = {}, 0.0
        for part, color in zip(parts, colormaps["Set2"].colors, strict=False):  # not the modes' colours
            starts[part], value = start, row["parts_us"].get(part, 0.0)
            if round(value):
                handles[part] = axes.barh(i, value, left=start, height=0.36, color=color)
            start += value
        axes.text(0, i - 0.25, row["who"], va="bottom", fontsize=10)
        (handles["step, not profiled"],) = axes.plot([row["step_us"]] * 2, [i - 0.26, i + 0.26], color="black")
        for key, part, style in (("floor_us", "matrix products", ":"), ("envs_us", "environment", "--")):
            if key in row:
                handles[COLUMNS[key]] = axes.barh(i, row[key], 0.44, starts[part], fill=False, ec="black", ls=style)
    axes.set(ylim=(len(rows) - 0.55, -0.75), yticks=[])
    axes.spines["left"].set_visible(False)  # the rows' names are there
    axes.set_title(f"Microseconds of an environment step, {common.describe_machine(record['machine'])}", loc="left")
    common.clean(axes)
    labels = sorted(handles, key=[*parts, *handles].index)  # in the order of the bars
    figure.legend([*map(handles.get, labels)], labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    common.run_tool(main, Args)
