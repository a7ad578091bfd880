"""Checks the CUDA paths on this machine's GPU, measures every script in every mode there, or trains in chunks.

In --seconds altogether: first what graphs must do, and that every mode of every script trains as its eager mode does;
then the speed of each mode beside the eager reference, in turn; then where the time of a step goes. Results are written
after every run, so that nothing is lost where the time ends, and a call with the same --out goes on with what is
missing there. With --learn instead: learning runs, which the next call takes up where this one has stopped them.

    python -m leanrl.tools.gpu
    python -m leanrl.tools.gpu --algorithms sac td3 --rounds 2 --out runs/h200
    python -m leanrl.tools.gpu --algorithms ppo_atari --rounds 2 --out runs/h200
    python -m leanrl.tools.gpu --learn --learning pong breakout --seeds 1 2 3 --max-seconds 540
"""

import functools
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from leanrl.support.errors import UsageError, require_at_least
from leanrl.support.run import write_json_atomically
from leanrl.tools import compare, profile
from leanrl.tools.common import (
    COLORS,
    benchmark_record,
    clean,
    describe_machine,
    fresh_folder,
    markdown_table,
    new_figure,
    results_folder,
    run_tool,
)
from leanrl.tools.gpu_equality import check, graph_checks, training_checks
from leanrl.tools.gpu_learn import Learning, learn
from leanrl.tools.gpu_plans import PLANS, Algorithm, Plan, contenders_with_bf16, is_fastest
from leanrl.tools.trials import (
    Contender,
    Deadline,
    Trial,
    contenders_of,
    parse_entry,
    read_json,
    require_distinct,
    run_trial,
)

# The share of --seconds that the checks may take; what is kept for the parts at the end, and what one of them may take.
CHECK_SHARE, PARTS_SECONDS, PART_SECONDS = 0.4, 110.0, 35.0
PART_STEPS, ATARI_PART_STEPS = 500, 10_240
LOAD_SECONDS = 0.2


@dataclass
class Args:
    algorithms: tuple[Algorithm, ...] = tuple(PLANS)
    """what is checked and measured, in this order"""
    seconds: float = 500.0
    """time limit of the checks and measurements together"""
    rounds: int = 3
    """measurements of each mode at most; as many as --seconds leaves time for"""
    learn: bool = False
    """train instead"""
    learning: tuple[Learning, ...] = ("pong", "breakout", "sac", "td3")
    """of --learn: PPO on Pong until 18 and on Breakout for 4 million steps, SAC and TD3 on HalfCheetah for a million"""
    seeds: tuple[int, ...] = (1,)
    """of --learn: every task with the first of them, then every task with the next"""
    at_once: int = 3
    """of --learn: runs that share the GPU"""
    max_seconds: float = 480.0
    """of --learn: after this many seconds the runs checkpoint and stop; the same call again continues them"""
    runs_dir: str = "runs"
    """folder of the run directories, in RUNS_DIR/gpu"""
    out: str | None = None
    """folder for the results, by default RUNS_DIR/gpu/TIME; what it has of this commit and GPU is not measured again"""


def main(args: Args) -> int:
    require_distinct(args, "algorithms", "learning", "seeds")
    require_at_least(args, 1, "rounds", "seconds", "at_once", "max_seconds")
    if not torch.cuda.is_available():
        raise UsageError("this tool needs a CUDA device, and this machine has none; `compare` measures on a CPU")
    device = torch.device("cuda", 0)
    out = results_folder(args, "gpu")
    runs_dir = fresh_folder(args.runs_dir, "gpu") if args.out else out
    # Several compile at once here, each with workers of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    if args.learn:
        runs_dir = Path(args.runs_dir) / "gpu" / "learn"
        return learn(args.learning, args.seeds, args.at_once, args.max_seconds, device, runs_dir, out)

    plans = [PLANS[name] for name in args.algorithms]
    results = Results(out, device, list(PLANS.values()))
    results.take_up(plans)
    end = Deadline.within(args.seconds)
    print("checks: what graphs must do, and every mode against eager", flush=True)
    end_of_checks = Deadline(end.at - (1 - CHECK_SHARE) * args.seconds)
    check(plans, device, runs_dir, end_of_checks, results.passed_checks, results.report)
    # What the checks did not use is for the speeds.
    kept = PARTS_SECONDS if results.missing_parts(plans) and args.seconds >= 3 * PARTS_SECONDS else 0.0
    measure(plans, args.rounds, device, runs_dir, Deadline(end.at - kept), results)
    take_apart(plans, end, results)
    results.write()
    results.draw()
    print(f"\n{results.text()}\n\nresults: {out}")
    return 0 if results.passed else 1


# ------------------------------------------------------------------------------------------------------------ SPEEDS


def measure(
    plans: Sequence[Plan], rounds: int, device: torch.device, runs_dir: Path, deadline: Deadline, results: "Results"
) -> None:
    """Runs every mode once a round, one at a time; what would end too late, or is in ``results``, is left out.

    The order turns around with every round, but for this: what counts most comes first.
    """
    turns = [(plan, contender) for plan in plans for contender in measured_contenders(plan, device)]
    turns.sort(key=lambda turn: not counts_most(*turn))
    lasted: dict[str, float] = {}
    known = {(trial.label, trial.seed) for trial in results.trials}
    for seed in range(1, rounds + 1):
        heard = {plan.pool for plan in plans if seed in results.envpool_rounds(plan)}
        order = turns if seed % 2 else sorted(reversed(turns), key=lambda turn: not counts_most(*turn))
        for plan, contender in order:
            if (contender.label, seed) in known:
                continue
            if deadline.seconds_left < lasted.get(contender.label, plan.expected_seconds):
                print(f"no time left for round {seed} of {contender.label}", flush=True)
                continue
            if plan.pool is not None and plan.pool not in heard:
                heard.add(plan.pool)
                try:
                    results.envpool.append({"round": seed, **plan.pool.measure(deadline)})
                except SystemExit as end:
                    print(f"EnvPool alone failed ({end.code})", file=sys.stderr, flush=True)
            print(f"[round {seed}] {contender.label}, {deadline.seconds_left:.0f} s left", flush=True)
            start = time.monotonic()
            with GpuLoad(device) as load:
                trial = run_trial(contender, seed, runs_dir / "runs", deadline)
            lasted[contender.label] = time.monotonic() - start
            results.trials.append(trial)
            results.load.append(load.points)
            results.write()


def measured_contenders(plan: Plan, device: torch.device) -> list[Contender]:
    """The reference, then every mode of the fast variants, each for as many steps as it does in seconds."""
    contenders = []
    for entry in (plan.reference, *plan.modes):
        if entry is not None:
            has_graphs = entry.endswith(("cudagraphs", "one-graph"))
            flags = [f"--total-timesteps={plan.steps[has_graphs]}", *plan.flags]
            contenders += contenders_with_bf16(plan, [entry], device, flags)
    return contenders


def counts_most(plan: Plan, contender: Contender) -> bool:
    """Whether a contender is measured before others: the plainest of its algorithm, and the fastest."""
    plainest = plan.reference or parse_entry(plan.modes[0], "algorithms")[0]
    return contender.label == plainest or is_fastest(contender)


class GpuLoad:
    """Context manager that writes down, several times per second, how busy a GPU is and how much memory it has in use.

    Attributes:
        points: (seconds since the start, percent of the time in which a kernel ran, 10**6 bytes); none without NVML.
    """

    def __init__(self, device: torch.device) -> None:
        self.points: list[tuple[float, float, float]] = []
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuLoad":
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._stop.wait(LOAD_SECONDS):
                busy, used = torch.cuda.utilization(self._device), torch.cuda.device_memory_used(self._device)
                self.points.append((time.monotonic() - self._start, float(busy), used / 1e6))
        except Exception as error:  # no package, no driver library, a counter that this GPU does not have
            tell_once(f"GPU utilisation is not recorded ({type(error).__name__}: {error})")


@functools.cache
def tell_once(line: str) -> None:
    """Prints ``line`` on stderr, if it did not do so before."""
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------- PARTS


def take_apart(plans: Sequence[Plan], deadline: Deadline, results: "Results") -> None:
    """Where the time of a step goes, for each plan's ``part_modes`` that ``results`` lack, as long as there is time."""
    for plan, entry in results.missing_parts(plans):
        if deadline.seconds_left < PART_SECONDS:
            print(f"no time left for the parts of {entry}", flush=True)
            continue
        print(f"parts of {entry}", flush=True)
        try:
            if plan.pool is not None:
                pool = plan.pool
                alone = results.envpool_sps(plan) or pool.measure(deadline)["sps"]
                row = profile.measure(entry, steps=ATARI_PART_STEPS, envpool_sps=alone, deadline=deadline)
                results.parts_atari.append(row)
            else:
                row = profile.measure(entry, steps=PART_STEPS, only_parts=True, deadline=deadline)
                results.parts.append(row | results.step_of(row["who"]))
        except SystemExit as end:
            print(f"parts of {entry}: failed ({end.code})", file=sys.stderr, flush=True)
        results.write()


# ----------------------------------------------------------------------------------------------------------- RESULTS


class Results:
    """What is known so far; ``write`` leaves it in ``out`` as gpu.json and table.md."""

    def __init__(self, out: Path, device: torch.device, plans: Sequence[Plan]) -> None:
        self.device = device
        self._out = out
        self._plans = plans
        self._labels = [[contender.label for contender in measured_contenders(plan, device)] for plan in plans]
        """of each plan, the plainest first"""
        self.checks: list[dict] = []
        self.trials: list[Trial] = []
        self.load: list[list[tuple[float, float, float]]] = []
        """of each trial"""
        self.envpool: list[dict] = []
        """what EnvPool does alone, of each round"""
        self.parts: list[dict] = []
        self.parts_atari: list[dict] = []

    def take_up(self, plans: Sequence[Plan]) -> None:
        """Goes on with what an earlier call has left in ``out``, but for what failed there and these plans do again.

        Raises:
            UsageError: that was another commit, or another GPU; or no one knows what the scripts were.
        """
        record = read_json(self._out / "gpu.json")
        if not record:
            return
        ours, theirs = (
            {key: machine.get(key) for key in ("git_commit", "device_name")}
            for machine in (benchmark_record("gpu", self.device)["machine"], record["machine"])
        )
        if ours != theirs:
            what = " on ".join(str(value) for value in theirs.values())
            raise UsageError(f"--out {self._out}: its gpu.json is of {what}; go on there, or take another folder")
        if ours["git_commit"] is None or ours["git_commit"].endswith("-dirty"):
            what = "the scripts may have changed since its gpu.json: commit them, or name the commit in GIT_COMMIT"
            raise UsageError(f"--out {self._out}: {what}; or take another folder")
        again = graph_checks().union(*(training_checks(plan, self.device) for plan in plans))
        others = self._expected_checks() - again
        self.checks = [row for row in record["checks"] if row["passed"] or row["check"] in others]
        again = {contender.label for plan in plans for contender in measured_contenders(plan, self.device)}
        for run in record["runs"]:
            load = run.pop("load")
            trial = Trial(**run)
            if not trial.failure or trial.label not in again:
                self.trials.append(trial)
                self.load.append(load)
        self.envpool, self.parts, self.parts_atari = (record[key] for key in ("envpool", "parts", "parts_atari"))

    def report(self, row: dict) -> None:
        """Takes a check's row, in place of an earlier one of its name; prints and writes it."""
        print(f"{'passed' if row['passed'] else 'FAILED'}: {row['check']}: {row['detail']}", flush=True)
        if "output" in row:
            print(row["output"], flush=True)
        self.checks = [known for known in self.checks if known["check"] != row["check"]] + [row]
        self.write()

    @property
    def passed_checks(self) -> set[str]:
        """The names of those."""
        return {row["check"] for row in self.checks if row["passed"]}

    @property
    def passed(self) -> bool:
        """Whether all checks passed and no measured run failed, but for those that the time has cut off."""
        return all(row["passed"] for row in self.checks) and not any(
            trial.failure and not trial.was_cut_off for trial in self.trials
        )

    def step_of(self, label: str) -> dict[str, float]:
        """Microseconds of a step of a measured mode, as ``step_us``; nothing where it was not measured."""
        sps = [trial.summary["sps"] for trial in self.trials if trial.label == label and not trial.failure]
        return {"step_us": 1e6 / statistics.median(sps)} if sps else {}

    def missing_parts(self, plans: Sequence[Plan]) -> list[tuple[Plan, str]]:
        """The ``part_modes`` that were not taken apart yet, the fastest of each plan first."""
        entries = [(plan, entry) for plan in plans for entry in plan.part_modes[-1:]]
        entries += [(plan, entry) for plan in plans for entry in plan.part_modes[:-1]]
        known = {row["who"] for row in (*self.parts, *self.parts_atari)}
        labels = {entry: contenders_of([entry], "algorithms", self.device)[0].label for _, entry in entries}
        return [(plan, entry) for plan, entry in entries if labels[entry] not in known]

    def envpool_sps(self, plan: Plan) -> float | None:
        """What EnvPool does alone with a plan's environments, in steps per second; None where it is not known."""
        rounds = self.envpool_rounds(plan)
        return statistics.median(rounds.values()) if rounds else None

    def envpool_rounds(self, plan: Plan) -> dict[int, float]:
        """The same of each round in which it was measured."""
        rows = [row for row in self.envpool if plan.pool and asdict(plan.pool).items() <= row.items()]
        return {row["round"]: row["sps"] for row in rows}

    def record(self) -> dict:
        """All of it, for JSON."""
        return {
            **benchmark_record("gpu", self.device),
            "checks": self.checks,
            "rows": [row for labels in self._labels for row in self._rows(labels)],
            "runs": [{**asdict(trial), "load": load} for trial, load in zip(self.trials, self.load, strict=True)],
            "envpool": self.envpool,
            "parts": self.parts,
            "parts_atari": self.parts_atari,
        }

    def _rows(self, labels: Sequence[str]) -> list[dict]:
        """Of a table, those modes that were run."""
        return [row for row in compare.summarize(self.trials, labels) if row["sps"] or row["failures"]]

    def write(self) -> None:
        write_json_atomically(self._out / "gpu.json", self.record())
        (self._out / "table.md").write_text(self.text() + "\n")

    def text(self) -> str:
        """The checks that failed, a table of speeds for each algorithm, and the parts."""
        failed = [row for row in self.checks if not row["passed"]]
        missing = self._expected_checks() - {row["check"] for row in self.checks}
        pieces = [describe_machine(benchmark_record("gpu", self.device)["machine"])]
        for plan, labels in zip(self._plans, self._labels, strict=True):
            rows = self._rows(labels)
            if rows:
                pieces.append(compare.render_table(rows))
            if rows and (alone := self.envpool_sps(plan)):
                pieces.append(beside_envpool(plan, rows, alone))
        if self.parts:
            pieces.append(profile.render({"rows": self.parts}))
        if self.parts_atari:
            pieces.append(profile.render({"rows": self.parts_atari}))
        summary = f"checks: {len(self.checks) - len(failed)} of {len(self.checks)} passed"
        if missing:
            summary += f", {len(missing)} not run yet"
        return "\n\n".join([*pieces, "\n".join([summary, *(f"FAILED: {r['check']}: {r['detail']}" for r in failed)])])

    def _expected_checks(self) -> set[str]:
        """The names of all that there are."""
        return graph_checks().union(*(training_checks(plan, self.device) for plan in self._plans))

    def draw(self) -> None:
        """gpu.png: bars of steps per second, one panel an algorithm; load.png; parts.png and parts_atari.png."""
        measured = [labels for labels in self._labels if any(trial.label in labels for trial in self.trials)]
        if measured:
            draw_speeds(self.trials, measured).savefig(self._out / "gpu.png")
        if any(self.load):
            draw_load(self.trials, self.load).savefig(self._out / "load.png")
        if self.parts:
            profile.draw({"rows": self.parts}).savefig(self._out / "parts.png")
        if self.parts_atari:
            profile.draw({"rows": self.parts_atari}).savefig(self._out / "parts_atari.png")


def beside_envpool(plan: Plan, rows: Sequence[dict], alone: float) -> str:
    """A table of what is left of EnvPool's own speed."""
    cells = [(row["label"], f"{statistics.median(row['sps']) / alone:.0%}") for row in rows if row["sps"]]
    pool = plan.pool
    what = f"of {alone:,.0f} steps/s"
    legend = f"EnvPool alone: {pool.env_id}, {pool.num_envs} environments, random actions, all cores."
    return f"{markdown_table(('program', what), cells)}\n\n{legend}"


def draw_speeds(trials: Sequence[Trial], families: Sequence[Sequence[str]]):
    """Bars of steps per second, one panel a family; the factors are those over its first label, the reference."""
    columns = min(2, len(families))
    lines = math.ceil(len(families) / columns)
    height = 1.0 + 0.75 * max(map(len, families))
    figure = new_figure(7 * columns, height * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, labels in zip(panels, families, strict=False):
        rows = [row for row in compare.summarize(trials, labels) if row["sps"]]
        compare.draw_speeds(axes, rows)
    for axes in panels[len(families) :]:
        axes.remove()
    return figure


def draw_load(trials: Sequence[Trial], load: Sequence[Sequence[tuple[float, float, float]]]):
    """How busy the GPU was over each run of the first round, one panel a run."""
    first = [(t, points) for t, points in zip(trials, load, strict=True) if points and t.seed == trials[0].seed]
    figure = new_figure(11, 0.4 + 1.1 * len(first))
    panels = figure.subplots(len(first), 1, squeeze=False).flatten()
    for axes, (trial, points) in zip(panels, first, strict=True):
        axes.plot([p[0] for p in points], [p[1] for p in points], color=COLORS[1])
        axes.set_ylim(0, 105)
        axes.set_title(trial.label, loc="left", fontsize=10)
        clean(axes)
    panels[-1].set_xlabel("seconds since the start of the process (percent of the time in which a kernel ran)")
    return figure


if __name__ == "__main__":
    run_tool(main, Args)
