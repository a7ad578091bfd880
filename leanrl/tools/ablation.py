"""How the rows of ``leanrl.tools.ablate`` are measured: a thing done without a trick and with it, in turn."""

import itertools
import math
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from leanrl.support import executables
from leanrl.support.replay import Replay
from leanrl.tools.trials import Contender, end_of, run_trial

CPU = torch.device("cpu")
PRODUCTS = torch.backends.mkldnn.matmul
# Shorter things are repeated within a sample, so that the clock does not decide.
SAMPLE_SECONDS = 0.1
# How far two sides may be apart, relative to the length of the vector. Where a gradient is nearly 0, Adam takes a whole
# step by its sign; and bfloat16 has two or three digits.
TOLERANCE, BF16_TOLERANCE = 1e-3, 0.5
# Compiling takes long and varies little.
MAX_STARTUP_REPEATS = 3

FUSED = patch.object(torch.optim.Adam, "__init__", partialmethod(torch.optim.Adam.__init__, fused=True))


@contextmanager
def in_force(changes: Sequence[AbstractContextManager]):
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def compiled(fn: Callable, **options) -> Callable:
    """As the fast scripts compile; ``options`` of TorchInductor beside theirs."""
    return executables.CompiledStep(fn, CPU, **options)


def in_pieces(fn: Callable) -> Callable:
    """As ``torch.compile`` compiles by default: where ``fn`` cannot be traced as one graph, as several."""
    return torch.compile(fn, dynamic=False, options=executables.compile_options(CPU))


def made(script: ModuleType, **flags) -> SimpleNamespace:
    """The variables of a script's ``main`` where its run would start: what it makes on the CPU, compiled if it can.

    Args:
        flags: fields of the script's ``Args``.
    """
    args = script.Args(device="cpu", **flags)
    if hasattr(args, "compile"):
        args.compile = True
    PRODUCTS.fp32_precision = "none"  # as in a new process

    class Made(Exception):
        pass

    def run(*_, **__):
        raise Made(sys._getframe(1).f_locals)

    with patch.object(script, "Run", run):
        try:
            script.main(args)
        except Made as stop:
            return SimpleNamespace(**stop.args[0])


# -------------------------------------------------------------------------------------------------------------- SIDES


@dataclass
class Side:
    """One way to do something: calls, one after the other, under the settings that the side was made under."""

    calls: list[Callable]
    steps: float
    """environment steps for which a run makes all of the calls"""
    parts: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(args=None))
    """what the calls change, as of ``made``; put back after a sample"""
    count: int = 0
    """of the thing that is measured; 0 stands for the number of calls"""
    changes: Sequence[AbstractContextManager] = ()
    """in force around the calls"""

    def __post_init__(self) -> None:
        self.count = self.count or len(self.calls)
        self._num_threads, self._products = torch.get_num_threads(), PRODUCTS.fp32_precision
        self._seeds, self._number = itertools.count(), 0

    @contextmanager
    def ready(self):
        """Around a sample. It has a seed of its own: what it draws from a replay is not in the cache from the last."""
        torch.set_num_threads(self._num_threads)
        PRODUCTS.fp32_precision = self._products
        state = [state_of(part) for part in vars(self.parts).values()]
        with in_force(self.changes), executables.untouched(state, CPU):
            torch.default_generator.manual_seed(next(self._seeds))
            yield

    def burst(self) -> None:
        """All of the calls."""
        for call in self.calls:
            call()

    def sample(self) -> float:
        """Seconds of a burst, the mean over as many as fill SAMPLE_SECONDS."""
        with self.ready():
            self._number = self._number or math.ceil(SAMPLE_SECONDS / timeit.timeit(self.burst, number=1))
            return timeit.timeit(self.burst, number=self._number) / self._number

    def outcome(self) -> dict[str, torch.Tensor]:
        """What the first burst returns, and how it changes networks and named tuples. Functions compile in it."""
        with self.ready():
            before = vectors(self.parts)
            leaves = (leaf for call in self.calls for leaf in tree_leaves(call()))
            returned = [flat(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            changes = {name: after - before[name] for name, after in vectors(self.parts).items()}
        return changes | ({"returned": torch.cat(returned)} if returned else {})


def state_of(part):
    """The tensors of something that a ``main`` makes, in lists and dictionaries; of a replay only the counters."""
    if isinstance(part, Replay):
        return part.tensors()
    return part.state_dict() if isinstance(part, nn.Module | torch.optim.Optimizer) else part


def flat(x: torch.Tensor) -> torch.Tensor:
    """A copy as one float32 vector."""
    return x.detach().flatten().to(torch.float32, copy=True)


def vectors(parts: SimpleNamespace) -> dict[str, torch.Tensor]:
    """By name, a copy of each network's parameters and of each field of the named tuples."""
    found = {}
    for name, part in vars(parts).items():
        if isinstance(part, nn.Module):
            found[name] = torch.cat([flat(parameter) for parameter in part.parameters()])
        elif hasattr(part, "_fields"):
            found |= {f"{name}.{field}": flat(column) for field, column in part._asdict().items()}
    return found


@dataclass
class WholeRun:
    """A run of a fast script, compiled, in a process of its own."""

    script: str
    steps: int
    """environment steps that are timed; 0 times the start"""
    flags: str
    change: str = ""
    """Python that is executed before, in which ``script`` is the module"""
    cold: bool = False
    """start with an empty cache of TorchInductor"""

    @property
    def count(self) -> int:
        """As of a Side."""
        return self.steps or 1

    def sample(self) -> float:
        """Seconds, by what the run says of its speed."""
        code = f"import leanrl.{self.script} as script, leanrl.support.cli as cli\n{self.change}\n"
        code += "cli.run_script(script.main, script.Args, script.__file__)"
        command = (sys.executable, "-c", code, "--device", "cpu", "--compile", *self.flags.split())
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"} if self.cold else {}
            trial = run_trial(Contender("run", command), 1, Path(folder), output=log, variables=cache)
            if trial.failure:
                raise RuntimeError(f"{trial.failure}\n{end_of(log)}")
        return self.steps / trial.summary["sps"] if self.steps else trial.summary["warmup_seconds"]


# --------------------------------------------------------------------------------------------------------------- ROWS


class Row:
    """A line of the table.

    Args:
        name: for --rows; several lines may share it.
        with_, without: make the side with the trick and the one without.
        changes: in force where the latter is made and run: patches of unittest.mock's.
        tolerance: of the relative difference; infinite where the trick is to compute something else.
    """

    def __init__(self, name, trick, with_, without, *changes, tolerance=TOLERANCE) -> None:
        self.name, self.trick = name, trick
        self._with, self._without, self._changes, self._tolerance = with_, without, changes, tolerance

    def sides(self) -> tuple[dict[str, Side | WholeRun], float | None]:
        """The sides "without" and "with" the trick, warmed up, and how far apart they are (None for whole runs).

        Raises:
            ValueError: they do not compute the same.
        """
        torch.set_num_threads(1)  # for those that no ``main`` sets up
        with in_force(self._changes):
            without = self._without()
        sides = {"without": without, "with": self._with()}
        if isinstance(sides["with"], WholeRun):
            return sides, None
        without.changes = self._changes
        b, a = (side.outcome() for side in sides.values())
        distances = [(a[key] - b[key]).norm() / b[key].norm().clamp(min=1e-12) for key in a.keys() & b.keys()]
        difference = torch.stack(distances).max().item()
        in_bf16 = any(getattr(side.parts.args, "amp", None) == "bf16" for side in sides.values())
        if not difference < max(self._tolerance, in_bf16 * BF16_TOLERANCE):  # nan too
            raise ValueError(f"{self.trick}: the two sides do not compute the same, relative distance {difference:.2g}")
        return sides, difference


def measure(row: Row, repeats: int, report: Callable[[str], None]) -> dict:
    """Samples both sides in turn, A B, B A, ...; gains are taken within a turn, since the machine's speed drifts."""
    report(row.trick)
    sides, difference = row.sides()
    steps, count = sides["with"].steps, sides["with"].count
    if steps:
        for side in sides.values():
            side.sample()
    turns = []
    for i in range(repeats if steps else min(repeats, MAX_STARTUP_REPEATS)):
        report(f"{row.trick} {i + 1}/{repeats}")
        turns.append({name: sides[name].sample() for name in (sides if i % 2 == 0 else reversed(sides))})
    saved = statistics.median(turn["without"] - turn["with"] for turn in turns)
    return {
        "trick": row.trick,
        **{f"seconds_{name}": statistics.median(turn[name] for turn in turns) / count for name in sides},
        "gain": statistics.median(turn["without"] / turn["with"] for turn in turns),
        "seconds_saved_per_env_step": saved / steps if steps else None,
        "difference": difference,
        "calls_per_sample": count,
        "env_steps_per_sample": steps or None,
        "seconds_per_sample": turns,
    }
