"""Time to score: the wall-clock time until the policy plays well, compared with the record.

A TASK is an environment and a target. Time counts from the start of the process, imports and compilation included, to
the first of two consecutive snapshots whose policies reach the target: a mean return over 10 episodes, with seeds that
no training environment uses (over 3, if all of them miss the target). Snapshots are taken during training, every 5 % of
the task's expected time, and played afterwards, off the clock. A run that takes three times the expected time is
stopped and listed as "> X". On a slower machine, set --expected-seconds to what the holder takes there.

The record holder and the contenders run in turn, each in its own process, with TorchInductor's cache cold (empty) and
warm (filled by a short run before). The order reverses from seed to seed, and ratios are taken within a seed. Records
use the seeds 101 to 103; others are for tuning. The same call with the same --out continues where the last one ended.

    python -m leanrl.tools.speedrun cartpole
    python -m leanrl.tools.speedrun cartpole --contenders "pqn_torchcompile:compile --num-envs 16" --cache warm
    python -m leanrl.tools.speedrun cheetah5k --contenders "sac_continuous_action_torchcompile:compile --amp bf16" \\
        --seeds 101 102 103
"""

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import tyro
from tqdm import tqdm

from leanrl.support.devices import has_bf16_units
from leanrl.support.errors import UsageError, bad, require_positive
from leanrl.support.evaluation import play
from leanrl.support.run import write_json_atomically
from leanrl.tools import common, peers, trials

EPISODES, FIRST_EPISODES = 10, 3
"""of each snapshot's evaluation; only the first ones if all of them miss the target"""
SNAPSHOTS = 20
"""within the expected time"""
PATIENCE = 3
"""A run is stopped after this many times the expected time."""
OWN_FLAGS = {*trials.RESERVED_FLAGS, "--env-id", "--max-seconds", "--snapshot-seconds"} - {"--total-timesteps"}
"""Flags of the scripts that this tool sets; the number of steps of a schedule is the contender's own choice."""
RECORDS = Path(__file__).parents[2] / "doc" / "benchmarks" / "speedruns"


class Task(NamedTuple):
    """What is to be learned, and how fast the record holder does it."""

    env_id: str
    target: float
    """mean return"""
    holder: str
    """of the record: SCRIPT:MODE FLAGS"""
    seconds: float
    """that the holder is expected to take"""


BF16 = " --amp bf16"
FAST_SAC = f"fast_sac_torchcompile:compile{BF16} --env-backend envpool"
PQN = (
    "pqn_torchcompile:eager --env-backend envpool --num-envs 32 --num-steps 64 --num-minibatches 16 --update-epochs 2"
    " --learning-rate 2e-3 --q-lambda 0.95 --end-e 0.2 --exploration-fraction 0.1 --total-timesteps 200000"
)
PPO = (
    "ppo_continuous_action_torchcompile:compile --env-backend envpool --num-envs 8 --num-steps 256"
    " --learning-rate 7e-4 --update-epochs 6"
)
PPO_ATARI = f"ppo_atari_envpool_torchcompile:compile{BF16} --norm-obs --num-envs 16 --num-steps 64 --learning-rate 1e-3"
TASKS = {
    "cartpole": Task("CartPole-v1", 475, PQN, 10),
    "cheetah5k": Task("HalfCheetah-v5", 5_000, FAST_SAC, 50),
    "cheetah10k": Task("HalfCheetah-v5", 10_000, FAST_SAC, 120),
    "cheetah-run": Task("CheetahRun-v1", 700, f"{FAST_SAC} --v-min -10 --v-max 100", 150),
    "hopper": Task("Hopper-v5", 2_500, PPO, 20),
    "pong": Task("Pong-v5", 18, f"{PPO_ATARI} --channels 8 --gamma 0.97 --total-timesteps 1200000", 200),
    "breakout": Task("Breakout-v5", 100, f"{PPO_ATARI} --channels 16 --update-epochs 2 --total-timesteps 2000000", 750),
}


@dataclass
class Args(common.OutArgs):
    task: tyro.conf.Positional[Literal[*TASKS]]
    """what is to be learned"""
    contenders: tuple[str, ...] = ()
    """SCRIPT[:MODE] or PEER (sb3:SAC) and its flags each, in addition to the record holder, which always runs"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """every contender runs once with each"""
    cache: Literal["cold", "warm", "both"] = "both"
    """TorchInductor's cache at the start of a run"""
    expected_seconds: float | None = None
    """that the record holder takes on this machine; None for the time on the record's"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every contender"""


def main(args: Args) -> int:
    trials.require_distinct(args, "seeds")
    require_positive(args, "expected_seconds")
    device = trials.target_device(args.script_args)
    contenders = chosen(task := task_for(args.task, device, args.expected_seconds), args)
    out = common.results_folder(args, "speedrun")
    caches = ("cold", "warm") if args.cache == "both" else (args.cache,)
    earlier = trials.earlier_record(out, "speedrun", device)
    if earlier and earlier["command"] != (command := common.benchmark_record("speedrun", device)["command"]):
        raise bad("out", out, f"its speedrun.json is of another call than {command}")
    runs = [run for run in earlier.get("runs", []) if not run["failure"]]
    # Two threads would mostly wait for each other on small vectors, and on images take a core from the emulator.
    torch.set_num_threads(1)

    def record() -> dict:
        # The first run is the holder's, also after one that failed and was repeated.
        runs.sort(key=lambda run: (run["cache"], [own.label for own in contenders].index(run["label"])))
        return common.benchmark_record("speedrun", device) | {"task": args.task, **task._asdict(), "runs": runs}

    def run(seed: int, cache: str, contender: trials.Contender) -> None:
        with tempfile.TemporaryDirectory() as folder:
            variables = {"TORCHINDUCTOR_CACHE_DIR": folder}
            if cache == "warm":
                short = replace(contender, command=(*contender.command, "--max-seconds=1"))
                filling = trials.run_trial(short, seed, out / "runs" / "filling", **variables)
                if filling.failure:
                    raise UsageError(f"{contender.label}: the run that fills the cache failed ({filling.failure})")
            runs.append({"cache": cache, **timed(task, variables, contender, seed, out / "runs" / cache)})
        write_json_atomically(out / "speedrun.json", record())

    known = {(run["seed"], run["cache"], run["label"]) for run in runs}
    rounds = trials.rounds_of([*itertools.product(caches, contenders)], args.seeds)
    turns = [(seed, cache, own) for seed, (cache, own) in rounds if (seed, cache, own.label) not in known]
    ended = trials.in_turn(
        {f"{own.label}, seed {seed}, {cache} cache": partial(run, seed, cache, own) for seed, cache, own in turns}
    )
    final = record()
    text = f"{task.env_id} to {task.target:,}, {common.describe_machine(final['machine'])}\n\n{render_table(final)}"
    if recorded := trials.read_json(RECORDS / f"{args.task.replace('-', '_')}.json"):
        times = ", ".join(f"{minutes(run)} ({run['cache']})" for run in recorded["runs"] if "holder" in run["label"])
        text += f"\n\nThe record, on {common.describe_machine(recorded['machine'])}: {times}"
    common.write_results(out, "speedrun", final, text, draw(final))
    return 130 if len(ended) < len(turns) else int(any(run["failure"] for run in runs))


def task_for(name: str, device: torch.device, seconds: float | None = None) -> Task:
    """One of TASKS; its holder runs in float32 where bf16 would be slower.

    Args:
        seconds: that the holder is expected to take; None for the task's own.
    """
    has_bf16, task = device.type == "cuda" or has_bf16_units(), TASKS[name]
    holder = task.holder if has_bf16 else task.holder.replace(BF16, "")
    return task._replace(holder=holder, seconds=seconds or task.seconds)


def chosen(task: Task, args: Args) -> list[trials.Contender]:
    """The task's record holder and ``--contenders``, with the flags for all. UsageError for what cannot run."""
    device, entries = trials.target_device(args.script_args), (task.holder, *args.contenders)
    for words in (args.script_args, *(entry.split()[1:] for entry in entries)):
        trials.check_flags(words, OWN_FLAGS)
    flags = [f"--env-id={task.env_id}", "--checkpoint-every=None", f"--snapshot-seconds={task.seconds / SNAPSHOTS}"]
    contenders = trials.contenders_of(entries, "contenders", device, [*flags, *args.script_args])
    for contender in contenders:
        trials.require_valid(contender)
    # Its flags would hide its times in a table.
    return [replace(contenders[0], label=f"{task.holder.partition(':')[0]} (holder)"), *contenders[1:]]


# ----------------------------------------------------------------------------------------------------------- MEASURING


def timed(task: Task, variables: dict[str, str], contender: trials.Contender, seed: int, runs_dir: Path) -> dict:
    """One run and the scores of its snapshots, as a dictionary for the JSON file; times are seconds since its start."""
    limit, start = PATIENCE * task.seconds, time.time()
    trial = trials.run_trial(contender, seed, runs_dir, trials.Deadline(time.monotonic() + limit), **variables)
    ended = time.time() - start
    failure = None if ended >= limit else trial.failure
    snapshots = [] if failure else evaluate(contender, Path(trial.run_dir), start, limit, task.target)
    return {
        "label": contender.label,
        "seed": seed,
        "command": trial.command,
        "failure": failure,
        "ended": min(ended, limit),
        "reached": reached(snapshots, task.target),
        "snapshots": snapshots,
        "args": trial.args,
        "summary": trial.summary,
    }


def evaluate(contender: trials.Contender, run_dir: Path, start: float, limit: float, target: float) -> list[dict]:
    """Plays a run's snapshots in order, without those after ``limit``, until two in a row reach the target."""
    snapshots = []
    script, _ = trials.script_and_flags(contender)
    if trials.peer_of(contender.label):  # only `peers` can load their policies
        script = SimpleNamespace(load_policy=peers.load_policy, PROTOCOL=getattr(script, "PROTOCOL", None))
    # disable=None: only on a terminal.
    files = tqdm(sorted(run_dir.glob("snapshots/*.pt")), desc="evaluating", unit="snapshot", leave=False, disable=None)
    for number, path in enumerate(files):
        content = torch.load(path, map_location="cpu", weights_only=True)
        seconds = content["time"] - start
        if seconds > limit or reached(snapshots, target) is not None:
            break
        played = partial(play, run_dir, seed=number, file=f"snapshots/{path.name}", script=script)
        returns = played(FIRST_EPISODES)
        returns = played(EPISODES) if max(returns) >= target else returns
        snapshots.append({"seconds": seconds, "global_step": content["global_step"], "returns": returns})
    return snapshots


def reached(snapshots: Sequence[dict], target: float) -> float | None:
    """Time of the first of two consecutive snapshots whose mean returns reach the target; None if there is none."""
    for first, second in itertools.pairwise(snapshots):
        if min(statistics.fmean(first["returns"]), statistics.fmean(second["returns"])) >= target:
            return first["seconds"]
    return None


# ------------------------------------------------------------------------------------------------------------- RESULTS


def minutes(run: dict) -> str:
    """``3:15``; ``> 9:00`` if the target was not reached in that time."""
    if run["failure"]:
        return f"failed ({run['failure']})"
    minutes, seconds = divmod(round(run["ended"] if run["reached"] is None else run["reached"]), 60)
    return f"{'> ' if run['reached'] is None else ''}{minutes}:{seconds:02}"


def until(run: dict) -> float:
    """Seconds to the target; infinite if it was not reached or the run failed."""
    return math.inf if run["failure"] or run["reached"] is None else run["reached"]


def render_table(record: dict) -> str:
    """A markdown table: minutes and seconds to the target by contender and cache."""
    runs = {(run["label"], run["cache"], run["seed"]): run for run in record["runs"]}
    (holder, *_), rows, seeds = next(iter(runs)), [], dict.fromkeys(seed for _, _, seed in runs)
    for label, cache in dict.fromkeys((label, cache) for label, cache, _ in runs):
        own = {seed: runs[label, cache, seed] for seed in seeds if (label, cache, seed) in runs}
        pairs = [(runs[holder, cache, seed], run) for seed, run in own.items() if (holder, cache, seed) in runs]
        ratios = [until(theirs) / (ours["reached"] or ours["ended"]) for theirs, ours in pairs if not ours["failure"]]
        bound = "< " if any(run["reached"] is None for run in own.values()) else ""
        known = len(ratios) == len(own) and max(ratios) < math.inf
        ratio = f"{bound}{statistics.median(ratios):.2f}x" if known else "-"
        # Runs that never reached the target are last. Of an even number, the upper middle one is taken: a real run.
        by_time = sorted(own.values(), key=lambda run: (until(run), run["ended"]))
        each = ", ".join(minutes(own[seed]) if seed in own else "-" for seed in seeds)
        rows.append((label, cache, each, minutes(by_time[len(own) // 2]), ratio))
    heading = f"min:s of {common.plural('seed', list(seeds))}"
    table = common.markdown_table(("program", "cache", heading, "median", "vs holder"), rows)
    return f"{table}\n\nvs holder (the first): how many times as fast, the median of the ratios within a seed."


def draw(*records: dict):
    """The figure: evaluated return against wall clock, a panel per task and cache, a line per run."""
    panels: dict[tuple, list[dict]] = {}
    for record in records:
        for run in record["runs"]:
            panels.setdefault((record["env_id"], record["target"], run["cache"]), []).append(run)
    rows, columns = math.ceil(len(panels) / 2), min(2, len(panels))
    figure = common.new_figure(5.5 * columns, 4.4 * rows)
    for place, ((env_id, target, cache), runs) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        holder, *others = dict.fromkeys(run["label"] for run in runs)
        colors = {holder: "black", **common.colors_of(others)}  # contenders have their usual colours
        for run in runs:
            points = [(snapshot["seconds"], statistics.fmean(snapshot["returns"])) for snapshot in run["snapshots"]]
            axes.plot(*np.reshape(points, (-1, 2)).T, ".-", color=colors[run["label"]])
        axes.axhline(target, color="black", linestyle=":", linewidth=1)
        axes.set_title(f"{env_id} to {target:,}, {cache} cache", loc="left")
        axes.set(xlabel="seconds of wall clock since the process started", ylabel="mean return", xlim=(0, None))
        lines = [axes.plot([], [], color=color)[0] for color in colors.values()]
        # Beneath the curves; a name that is longer is whole in the table.
        names = [name[:70] + " ..." * (len(name) > 70) for name in colors]
        axes.legend(lines, names, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.17))
        common.clean(axes)
    machines = dict.fromkeys(common.describe_machine(record["machine"]) for record in records)
    figure.suptitle("\n".join(["Snapshots' returns until two reach the target (dotted)", *machines]), fontsize=9)
    return figure


if __name__ == "__main__":
    common.run_tool(main, Args)
