"""What keeping freed memory is worth to the fast rungs: a row of ``leanrl.tools.ablate`` for each.

Whole runs in processes of their own: what the C library gives back depends on all that they hold.
"""

import importlib
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from leanrl.tools.ablation import Pair, told_by_process


def memory_pairs(script: str, num_steps: int, **flags) -> Iterator[Pair]:
    """Training with a fast rung, compiled, in float32 and in bf16.

    Args:
        script: its name.
        num_steps: environment steps of a run, a multiple of what a rollout takes.
        flags: other arguments of its runs.
    """
    with tempfile.TemporaryDirectory() as cache:
        for amp in ("none", "bf16"):
            arguments = {"total_timesteps": num_steps, "amp": amp, **flags}
            given_back, kept = (
                partial(told_by_process, __name__, f"time_run({script!r}, {keep}, **{arguments})", cache)
                for keep in (False, True)
            )
            trick = f"freed memory kept: training, {amp.replace('none', 'float32')}"
            yield Pair(trick, given_back, kept, num_steps, num_steps)


def time_run(script: str, keep: bool, **flags) -> None:
    """Prints the seconds that as many environment steps as the run has would take at the speed it trained with."""
    fast = importlib.import_module(f"leanrl.{script}")
    if not keep:
        fast.keep_freed_memory = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(io.StringIO()):
            fast.main(fast.Args(compile=True, runs_dir=folder, run_name="run", **flags))
        print(flags["total_timesteps"] / json.loads((Path(folder) / "run" / "summary.json").read_text())["sps"])
