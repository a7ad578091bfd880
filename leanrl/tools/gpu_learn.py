"""Learning runs on a GPU, several at once and in chunks: what ``leanrl.tools.gpu --learn`` does."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from leanrl.support.run import write_json_atomically
from leanrl.support.tracking import read_metrics
from leanrl.tools import compare
from leanrl.tools.common import COLORS, benchmark_record, clean, describe_machine, markdown_table, mean_std, new_figure
from leanrl.tools.trials import (
    SCRIPTS,
    STOPPED,
    Deadline,
    Trial,
    end_of,
    flags_of,
    last_episodes,
    parse_entry,
    run_child,
)

Learning = Literal["sac", "td3", "pong", "breakout"]


@dataclass(frozen=True)
class Task:
    """What is learned, and when it is enough."""

    entry: str
    """SCRIPT:MODE"""
    env_id: str
    timesteps: int
    """of the whole run, which schedules depend on"""
    stop_at: int | None = None
    """environment steps that are enough"""
    target: float | None = None
    """the mean of the last 100 episodes that is enough"""

    def is_learned(self, run_dir: Path) -> bool:
        """Whether what a run has logged so far is enough."""
        points = read_metrics(run_dir)
        if self.stop_at is not None and points and points[-1]["global_step"] >= self.stop_at:
            return True
        reached = last_episodes(points)
        return self.target is not None and reached is not None and reached >= self.target


ATARI = "ppo_atari_envpool_torchcompile"
TASKS: dict[Learning, Task] = {
    "sac": Task("sac_continuous_action_torchcompile:compile+one-graph", "HalfCheetah-v5", 1_000_000),
    "td3": Task("td3_continuous_action_torchcompile:compile+one-graph", "HalfCheetah-v5", 1_000_000),
    # The learning rate falls as it does on the way to CleanRL's 10 million steps, whose curves are known.
    "pong": Task(f"{ATARI}:compile+one-graph", "Pong-v5", 10_000_000, target=18.0),
    "breakout": Task(f"{ATARI}:compile+one-graph", "Breakout-v5", 10_000_000, stop_at=4_000_000),
}
LEARNING_FLAGS = ("--num-threads=1", "--checkpoint-every=250000", "--save-model")

# How often a run's log points are read, and how often what is known is written.
LOOK_SECONDS, WRITE_SECONDS = 2.0, 30.0


class Enough:
    """A deadline that has also passed once a run has learned its task."""

    def __init__(self, deadline: Deadline, task: Task, run_dir: Path) -> None:
        self._deadline, self._task, self._run_dir = deadline, task, run_dir
        self._looked, self._learned = time.monotonic(), False

    @property
    def seconds_left(self) -> float:
        """Below 0 once it has passed."""
        if time.monotonic() >= self._looked + LOOK_SECONDS:
            self._learned, self._looked = self._task.is_learned(self._run_dir), time.monotonic()
        return -1.0 if self._learned else self._deadline.seconds_left


def learn(
    names: Sequence[Learning],
    seeds: Sequence[int],
    at_once: int,
    max_seconds: float,
    device: torch.device,
    runs_dir: Path,
    out: Path,
) -> int:
    """Starts, or goes on with, the learning runs, ``at_once`` at a time, until they end or the time does."""
    deadline = Deadline.within(max_seconds)
    runs = [(name, seed) for seed in seeds for name in names]
    runs_dir.mkdir(parents=True, exist_ok=True)
    print(f"{len(runs)} runs, {at_once} at a time, for up to {max_seconds:.0f} s in {runs_dir}", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(learn_on, name, seed, runs_dir, deadline) for name, seed in runs]
        try:
            while wait(futures, WRITE_SECONDS).not_done:
                write([learned(*run, None, runs_dir) for run in runs], device, out)
            codes = [future.result() for future in futures]
        except BaseException:
            deadline.at = 0.0  # the children too are to stop
            raise
    trials = [learned(*run, code, runs_dir) for run, code in zip(runs, codes, strict=True)]
    for trial in trials:
        if trial.exit_code:
            print(f"{trial.run_dir}: exit {trial.exit_code}\n{end_of(Path(trial.run_dir + '.log'))}", flush=True)
    print(f"\n{write(trials, device, out)}\n\nresults: {out}")
    draw_learning(trials).savefig(out / "learn.png")
    return 1 if any(trial.exit_code for trial in trials) else 0


def write(trials: Sequence[Trial], device: torch.device, out: Path) -> str:
    """Leaves what is known so far in learn.json and learn.md; what that says."""
    record = {**benchmark_record("gpu", device), "runs": [asdict(trial) for trial in trials]}
    write_json_atomically(out / "learn.json", record)
    text = f"{describe_machine(record['machine'])}\n\n{learning_table(trials)}"
    (out / "learn.md").write_text(text + "\n")
    return text


def learn_on(name: Learning, seed: int, runs_dir: Path, deadline: Deadline) -> int:
    """One run from its last checkpoint, or from the start; its exit code, 0 where nothing or no time is left."""
    task, run_name = TASKS[name], f"{name}__{seed}"
    if deadline.seconds_left <= 0 or state_of(learned(name, seed, None, runs_dir)) == "done":
        return 0
    script, levers = parse_entry(task.entry, "learning")
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), f"--total-timesteps={task.timesteps}"]
    if (runs_dir / run_name / "args.json").exists():
        command += ["--resume", str(runs_dir / run_name)]
    else:
        command += [f"--env-id={task.env_id}", f"--seed={seed}", f"--runs-dir={runs_dir}", f"--run-name={run_name}"]
        command += [*flags_of(script, levers), *LEARNING_FLAGS]
    code, _ = run_child(command, Enough(deadline, task, runs_dir / run_name), runs_dir / f"{run_name}.log")
    # In its first seconds, imports and compilation, a run has nothing to lose.
    return 0 if deadline.seconds_left <= 0 and code in STOPPED else code


def learned(name: Learning, seed: int, exit_code: int | None, runs_dir: Path) -> Trial:
    """What a learning run has left so far; its ``exit_code`` is None while it may run."""
    trial = Trial(name, seed, [], str(runs_dir / f"{name}__{seed}"), exit_code)
    trial.read()
    return trial


def learning_table(trials: Sequence[Trial]) -> str:
    """Steps so far, return and time of each run."""
    cells = []
    for trial in trials:
        task, reached = TASKS[trial.label], last_episodes(trial.metrics)
        row = [f"{task.entry}, {task.env_id}, seed {trial.seed}", "-", "-", "-", "-", state_of(trial)]
        if trial.metrics:
            point = trial.metrics[-1]
            row[1:5] = (
                f"{point['global_step']:,}",
                mean_std([] if reached is None else [reached], digits=1),
                f"{point['charts/wall_seconds']:,.0f}",
                f"{point['charts/SPS']:,.0f}",
            )
        cells.append(row)
    legend = (
        "return: mean of the last 100 training episodes; wall s: all starts together; sps: of the last start. "
        "Runs shared the GPU and the cores."
    )
    return f"{markdown_table(('run', 'steps', 'return', 'wall s', 'sps', 'state'), cells)}\n\n{legend}"


def state_of(trial: Trial) -> str:
    """Whether a run is to be gone on with."""
    if trial.exit_code:
        return f"exit {trial.exit_code}"
    if not trial.metrics and not trial.summary:
        return "not begun"
    ended = trial.summary and not trial.summary["interrupted"]
    return "done" if ended or TASKS[trial.label].is_learned(Path(trial.run_dir)) else "to go on"


def draw_learning(trials: Sequence[Trial]):
    """Episodic return against steps and against wall clock; a row an environment, a line a run, a colour a task."""
    env_ids = list(dict.fromkeys(TASKS[trial.label].env_id for trial in trials))
    figure = new_figure(14, 1 + 4 * len(env_ids))
    colors = dict(zip(TASKS, COLORS[1:], strict=False))
    x_labels = {"global_step": "environment steps", "charts/wall_seconds": "seconds of wall clock, all starts together"}
    panels = figure.subplots(len(env_ids), 2, squeeze=False)
    for env_id, line in zip(env_ids, panels, strict=True):
        for axes, (x_key, x_label) in zip(line, x_labels.items(), strict=True):
            for trial in trials:
                if TASKS[trial.label].env_id == env_id:
                    label = trial.label if trial.seed == trials[0].seed else None
                    axes.plot(*compare.learning_curve(trial, x_key), color=colors[trial.label], label=label)
            axes.set_xlabel(x_label)
            axes.set_title(f"Episodic return in training, {env_id}", loc="left")
            axes.legend(frameon=False)
            clean(axes)
    return figure
