"""How the rows of ``leanrl.tools.ablate`` are measured: a thing done without a trick and with it, in turn."""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps

import torch

from leanrl.support.devices import use_onednn_products
from leanrl.support.executables import CompiledStep, compile_options, untouched
from leanrl.tools.trials import REPOSITORY

CPU = torch.device("cpu")
# Shorter things are repeated within a sample, so that the clock does not decide.
SAMPLE_SECONDS = 0.1
# How far two sides may be apart, relative to the length of the vector.
TOLERANCE = 1e-4
# Compiling takes long and varies little.
MAX_STARTUP_REPEATS = 3


@dataclass
class Side:
    """One way to do something many times over."""

    burst: Callable[[], Iterable[torch.Tensor]]
    """does it, and returns what the other side must give too; an iterator's own work is not timed"""
    steps: float
    """environment steps for which a run has one burst"""
    calls: int = 1
    """of the thing, in a burst"""
    touched: Sequence = ()
    """put back after a sample"""
    num_threads: int = 1


@dataclass
class Pair:
    """A line of the table: two functions that take a sample each, in seconds."""

    trick: str
    without: Callable[[], float]
    with_: Callable[[], float]
    calls: int = 1
    steps: float | None = None
    """None: it is paid once, when a run starts"""
    difference: float | None = None
    """relative, between what the two compute"""
    facts: str = ""
    """for a line below the table"""


@dataclass
class Group:
    """Rows that share a table."""

    title: str
    legend: str = ""
    rows: dict[str, Callable[[], Iterator[Pair]]] = field(default_factory=dict)
    """name -> pairs, each to be measured before the next is asked for"""

    def row(self, build: Callable[[], Iterator[Pair]]) -> Callable[[], Iterator[Pair]]:
        """Decorator: ``build`` is a row under its name."""
        self.rows[build.__name__] = build
        return build


@contextmanager
def matrix_products(precision: str | None = None) -> Iterator[None]:
    """float32 matrix products as the scripts set them, or as oneDNN does them that may use ``precision``."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        if precision is None:
            use_onednn_products()
        else:
            settings.fp32_precision = precision
        yield
    finally:
        settings.fp32_precision = before


def row_of(group: Group) -> Callable:
    """Decorator: a row of ``group``, measured with the matrix products that the scripts use."""

    def decorate(build: Callable[[], Iterator[Pair]]) -> Callable:
        @wraps(build)
        def rows() -> Iterator[Pair]:
            with matrix_products():
                yield from build()

        return group.row(rows)

    return decorate


Compiler = Callable[[Callable], Callable]


def eager(fn: Callable) -> Callable:
    return fn


def compiled(**options) -> Compiler:
    """As the fast variants compile; ``options`` instead of TorchInductor's that they choose."""
    return lambda fn: CompiledStep(fn, CPU, **options)


def in_pieces(fn: Callable) -> Callable:
    """As ``torch.compile`` compiles by default: where ``fn`` cannot be traced as one graph, as several."""
    return torch.compile(fn, dynamic=False, options=compile_options(CPU))


def outcome(side: Side) -> list[torch.Tensor]:
    """What one burst computes. It is also the warm-up, compilation included."""
    torch.set_num_threads(side.num_threads)
    with torch.no_grad(), untouched(side.touched, CPU):
        return [tensor.clone() for tensor in side.burst()]


def sampler(side: Side) -> Callable[[], float]:
    """The function that times a side: seconds a burst, the mean over as many as fill SAMPLE_SECONDS."""
    number = 0

    def sample() -> float:
        nonlocal number
        torch.set_num_threads(side.num_threads)
        with torch.no_grad(), untouched(side.touched, CPU):
            number = number or math.ceil(SAMPLE_SECONDS / timeit.timeit(side.burst, number=1))
            return timeit.timeit(side.burst, number=number) / number

    return sample


def pair(trick: str, without: Side, with_: Side, facts: str = "", tolerance: float = TOLERANCE) -> Pair:
    """Two sides as a line of the table; ValueError where they do not compute the same.

    Args:
        tolerance: of the relative difference; infinity where the trick is to compute something else.
    """
    both = zip(outcome(with_), outcome(without), strict=True)
    difference = max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in both)
    if not difference < tolerance:  # nan too
        raise ValueError(f"{trick}: the two sides compute different things, relative distance {difference:.2g}")
    return Pair(trick, sampler(without), sampler(with_), with_.calls, with_.steps, difference, facts)


def measure(line: Pair, repeats: int, report: Callable[[str], None]) -> dict:
    """Samples both sides in turn, A B, B A, ...; gains are taken within a turn, since the machine's speed drifts."""
    sides = [("without", line.without), ("with", line.with_)]
    if line.steps is None:
        repeats = min(repeats, MAX_STARTUP_REPEATS)
    else:
        for _, sample in sides:
            sample()
    turns = []
    for i in range(repeats):
        report(f"{line.trick} {i + 1}/{repeats}")
        turns.append({name: sample() for name, sample in (sides if i % 2 == 0 else sides[::-1])})
    seconds = {name: statistics.median(turn[name] for turn in turns) / line.calls for name, _ in sides}
    saved = statistics.median(turn["without"] - turn["with"] for turn in turns)
    return {
        "trick": line.trick,
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "gain": statistics.median(turn["without"] / turn["with"] for turn in turns),
        "seconds_saved_per_env_step": saved / line.steps if line.steps else None,
        "difference": line.difference,
        "facts": line.facts,
        "calls_per_sample": line.calls,
        "env_steps_per_sample": line.steps,
        "seconds_per_sample": turns,
    }


def printed_by_process(module: str, call: str, cache: str | None = None) -> float:
    """The number that ``module``'s function prints in a new process.

    Args:
        call: the function with its arguments, in which the module is called ``rows``.
        cache: folder of TorchInductor's cache, by default an empty one.
    """
    with tempfile.TemporaryDirectory() as empty:
        # In a process group of its own, Ctrl-C does not reach it: this process ends it.
        how = {"cwd": REPOSITORY, "stdout": subprocess.PIPE, "process_group": 0}
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache or empty}
        command = [sys.executable, "-c", f"import {module} as rows; rows.{call}"]
        return float(subprocess.run(command, check=True, env=env, **how).stdout)
