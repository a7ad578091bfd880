"""Learning runs on a GPU, all at once and in chunks: what ``leanrl.tools.gpu --learn`` does."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from leanrl.support.run import write_json_atomically
from leanrl.tools import compare
from leanrl.tools.common import COLORS, benchmark_record, clean, describe_machine, markdown_table, mean_std
from leanrl.tools.trials import REPOSITORY, Deadline, Trial, end_of, run_child

LEARNING = ("sac_continuous_action_onegraph", "td3_continuous_action_onegraph")
LEARNING_FLAGS = ("--compile", "--cudagraphs", "--num-threads=1", "--checkpoint-every=None", "--save-model")


def learn(
    seeds: Sequence[int], timesteps: int, max_seconds: float, device: torch.device, runs_dir: Path, out: Path
) -> int:
    """Starts, or goes on with, every learning run; all run at once until they end or the time does."""
    deadline = Deadline.within(max_seconds)
    names = [(script, seed) for script in LEARNING for seed in seeds]
    runs_dir.mkdir(parents=True, exist_ok=True)
    print(f"{len(names)} runs at once for up to {max_seconds:.0f} s in {runs_dir}", flush=True)
    with ThreadPoolExecutor(len(names)) as pool:
        try:
            codes = [pool.submit(learn_on, script, seed, timesteps, runs_dir, deadline) for script, seed in names]
            codes = [code.result() for code in codes]
        except BaseException:
            deadline.at = 0.0  # the children too are to stop
            raise
    trials = [learned(script, seed, code, runs_dir) for (script, seed), code in zip(names, codes, strict=True)]
    record = {**benchmark_record("gpu", device), "runs": [asdict(trial) for trial in trials]}
    write_json_atomically(out / "learn.json", record)
    for trial in trials:
        if trial.exit_code:
            print(f"{trial.run_dir}: exit {trial.exit_code}\n{end_of(Path(trial.run_dir + '.log'))}", flush=True)
    text = f"{describe_machine(record['machine'])}\n\n{learning_table(trials)}"
    (out / "learn.md").write_text(text + "\n")
    draw_learning(trials).savefig(out / "learn.png")
    print(f"\n{text}\n\nresults: {out}")
    return 1 if any(trial.exit_code for trial in trials) else 0


def learn_on(script: str, seed: int, timesteps: int, runs_dir: Path, deadline: Deadline) -> int:
    """One run from its last checkpoint, or from the start; its exit code."""
    name = f"{script}__{seed}"
    command = [sys.executable, str(REPOSITORY / "leanrl" / f"{script}.py")]
    if (runs_dir / name / "args.json").exists():
        command += ["--resume", str(runs_dir / name)]
    else:
        command += [f"--seed={seed}", f"--runs-dir={runs_dir}", f"--run-name={name}", *LEARNING_FLAGS]
    command.append(f"--total-timesteps={timesteps}")
    code, _ = run_child(command, deadline, runs_dir / f"{name}.log")
    return code


def learned(script: str, seed: int, exit_code: int, runs_dir: Path) -> Trial:
    """What a learning run has left so far."""
    run_dir = runs_dir / f"{script}__{seed}"
    trial = Trial(script, seed, [], str(run_dir), exit_code)
    trial.read()
    return trial


def learning_table(trials: Sequence[Trial]) -> str:
    """Steps so far, return and time of each run."""
    cells = []
    for trial in trials:
        summary = trial.summary
        if not summary:
            cells.append((f"{trial.label}, seed {trial.seed}", "-", "-", "-", "-", f"exit {trial.exit_code}"))
            continue
        done = "interrupted" if summary["interrupted"] else "done"
        reached = [] if summary["episodic_return"] is None else [summary["episodic_return"]]
        cells.append(
            (
                f"{trial.label}, seed {trial.seed}",
                f"{summary['global_step']:,}",
                mean_std(reached),
                f"{summary['wall_seconds']:,.0f}",
                f"{summary['sps']:,.0f}",
                f"exit {trial.exit_code}" if trial.exit_code else done,
            )
        )
    legend = (
        "return: mean of the last 100 training episodes; wall s: all starts together; sps: of the last start. "
        "All runs shared the GPU and the cores."
    )
    return f"{markdown_table(('run', 'steps', 'return', 'wall s', 'sps', 'state'), cells)}\n\n{legend}"


def draw_learning(trials: Sequence[Trial]):
    """Episodic return against steps and against wall clock, a line a run, a colour a script."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    figure = Figure(figsize=(14, 5), layout="constrained", dpi=120)
    colors = dict(zip(LEARNING, COLORS[1:], strict=False))
    x_labels = {"global_step": "environment steps", "charts/wall_seconds": "seconds of wall clock, all starts together"}
    for axes, (x_key, x_label) in zip(figure.subplots(1, 2), x_labels.items(), strict=True):
        for trial in trials:
            label = trial.label if trial.seed == trials[0].seed else None
            axes.plot(*compare.learning_curve(trial, x_key), color=colors[trial.label], label=label)
        axes.set_xlabel(x_label)
        axes.set_title("Episodic return in training", loc="left")
        clean(axes)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    return figure
