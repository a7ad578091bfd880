"""What the tools share: the entry point, the results folder, benchmark records, tables and pictures."""

import importlib.metadata
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from leanrl.support.errors import UsageError, bad, pip_command
from leanrl.support.run import machine_facts, write_json_atomically

# Okabe and Ito's colours, which colour-blind readers can tell apart, without the one too pale for lines.
COLORS = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
# What the label of a mode or a peer contains -> its colour wherever modes are compared; the first that fits.
MODE_COLORS = {"bf16": COLORS[2], "graph": COLORS[6], "sb3:": COLORS[3], "sbx:": COLORS[4], "rl_games:": COLORS[7]}
MODE_COLORS |= {"-compile": COLORS[1], ":compile": COLORS[1], "_torchcompile": COLORS[5], "cleanba_": COLORS[7]}
MODE_COLORS[""] = COLORS[0]


def run_tool(main: Callable, args_type: type) -> None:
    """Entry point of every tool: parses the command line, calls ``main(args)`` and exits with what it returns.

    The module's docstring is the help text. A UsageError, or a missing package, becomes one line on stderr and exit
    code 2; Ctrl-C becomes exit code 130 without a traceback. SIGTERM and a closed terminal unwind the tool too, so that
    it can stop the processes it has started.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    module = sys.modules[main.__module__]
    tool = Path(module.__file__).stem
    try:
        args = tyro.cli(args_type, prog=f"python -m leanrl.tools.{tool}", description=module.__doc__)
        raise SystemExit(main(args))
    except (UsageError, ModuleNotFoundError) as error:
        remedy = "" if isinstance(error, UsageError) else f"; {pip_command('dev')}"
        print(f"{tool}: {error}{remedy}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"\n{tool}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


@dataclass(kw_only=True)
class OutArgs:
    """Where a tool leaves its results."""

    out: str | None = None
    """folder for the results and, if there are any, the run directories; by default RUNS_DIR/TOOL/TIME"""
    runs_dir: str = "runs"
    """folder of the default --out"""


def results_folder(args: OutArgs, tool: str) -> Path:
    """``--out``, or a fresh folder. It is created before anything is measured, so that no result can be lost."""
    out = Path(args.out or Path(args.runs_dir, tool, time.strftime("%Y%m%d-%H%M%S")))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise bad("out" if args.out else "runs_dir", out, f"cannot be made ({error.strerror})") from None
    return out


def benchmark_record(tool: str, device: torch.device, packages: Sequence[str] = ()) -> dict:
    """How a benchmark was made: command, time and machine, with the versions of ``packages`` too."""
    machine = machine_facts(device)
    # The number of this process means nothing; each run's args.json has its own.
    del machine["torch_threads"]
    machine["versions"] |= {name: importlib.metadata.version(name) for name in packages}
    return {
        "tool": tool,
        "command": shlex.join(["python", "-m", f"leanrl.tools.{tool}", *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load_average": os.getloadavg(),
        "machine": machine,
    }


def describe_machine(machine: dict) -> str:
    """``AMD EPYC 9555, 2 cores, torch 2.13.0``: one line for tables and pictures."""
    cores = machine["cpu_cores"]
    return f"{machine['device_name']}, {cores} core{'s' * (cores != 1)}, torch {machine['versions']['torch']}"


def write_results(out: Path, tool: str, record: dict, text: str, figure=None) -> None:
    """Writes ``TOOL.json``, ``table.md`` and, if there is a figure, ``TOOL.png`` to ``out``; prints the table."""
    write_json_atomically(out / f"{tool}.json", record)
    (out / "table.md").write_text(text + "\n")
    if figure is not None:
        figure.savefig(out / f"{tool}.png")
    print(f"\n{text}\n\nin {out}: {tool}.json, table.md{f', {tool}.png' if figure is not None else ''}")


def plural(noun: str, items: Sequence) -> str:
    """``seed 1``, ``seeds 1 2``: a noun and the items it counts."""
    return f"{noun}{'s' if len(items) != 1 else ''} {' '.join(map(str, items))}"


# ------------------------------------------------------------------------------------------------------------ TABLES


def rounded(values: Sequence[float], spread: float) -> list[str]:
    """Numbers to two figures of their spread, such as ``7,850``, or to three of their own; at most one decimal."""
    place = min(1, 1 - int(f"{spread or max(map(abs, values)) / 10 or 1:e}".partition("e")[2]))
    return [f"{round(value, place):,.{max(0, place)}f}" for value in values]


def mean_std(values: Sequence[float]) -> str:
    """``7,850 ± 120``: the mean and, for two or more values, the sample standard deviation; ``-`` for none."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return " ± ".join(rounded([statistics.fmean(values), spread][: len(values)], spread)) if values else "-"


def median(values: Sequence[float], digits: int = 0) -> str:
    """``7,850``: the median; ``-`` for none."""
    return f"{statistics.median(values):,.{digits}f}" if values else "-"


def median_speed(values: Sequence[float]) -> str:
    """``7,850``: the median to three figures; ``-`` for none."""
    return rounded([statistics.median(values)], max(10, statistics.median(values) / 10))[0] if values else "-"


def failure_note(failures: Sequence[str]) -> str:
    """`` (2 failed: exit 1, signal 9)``, or nothing."""
    return f" ({len(failures)} failed: {', '.join(dict.fromkeys(failures))})" if failures else ""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table whose columns line up on a terminal too: the first left-aligned, the others right-aligned."""
    columns = []
    for title, *cells in zip(header, *rows, strict=True):
        width = max(map(len, (title, *cells)))
        rule, align = ("-" * (width - 1) + ":", str.rjust) if columns else ("-" * width, str.ljust)
        columns.append([align(cell, width) for cell in (title, rule, *cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


# ---------------------------------------------------------------------------------------------------------- PICTURES


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """Each label's colour: its mode's or peer's or, if that is taken, an unused one from the end of COLORS."""
    found = {}
    for label in dict.fromkeys(labels):
        of_mode = next(color for part, color in MODE_COLORS.items() if part in label)
        left = [color for color in (of_mode, *reversed(COLORS)) if color not in found.values()]
        found[label] = left[0] if left else of_mode
    return found


def new_figure(width: float, height: float):
    """A matplotlib figure of this size in inches, without pyplot, which would look for a screen."""
    from matplotlib.figure import Figure  # takes 0.5 s; --help need not wait for it

    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def clean(axes) -> None:
    """Removes clutter; few ticks on the x-axis, commas in thousands. Call it before giving ticks names."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(nbins=6)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
