"""Measures the pip-installed Stable-Baselines3 and SBX beside our scripts: same task, same hyperparameters, in turn.

Every run is a process of its own, one at a time; the order turns around from round to round, and ratios are taken
within a round. All speeds are measured by the same code (see leanrl.tools.peer_worker, which also shows how the peers'
algorithms differ). A peer runs with each of --peer-threads and counts with the fastest. Flags after -- are those of the
eager reference, and go to all.

    python -m leanrl.tools.peers
    python -m leanrl.tools.peers --num-envs 64 --env-backend envpool --total-timesteps 524288
    python -m leanrl.tools.peers --algorithm sac_continuous_action --amp none bf16 --total-timesteps 6000 \\
        -- --learning-starts 1000
    python -m leanrl.tools.peers --seeds 1 --peers sb3 -- --env-id Hopper-v5
    python -m leanrl.tools.peers --algorithm ppo_atari_envpool --peers sb3 --num-envs 8 --total-timesteps 10240
"""

import importlib.metadata
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from leanrl.support.envs import EnvBackend
from leanrl.support.errors import UsageError, bad
from leanrl.tools.common import (
    benchmark_record,
    describe_machine,
    draw_bars,
    failure_note,
    markdown_table,
    new_figure,
    results_folder,
    run_tool,
    write_results,
)
from leanrl.tools.peer_worker import ALGORITHMS, PEERS
from leanrl.tools.trials import (
    Contender,
    Trial,
    check_script_args,
    contenders_of,
    exit_code,
    measured,
    peak_memories,
    require_distinct,
    require_valid,
    run_trials,
    sps_ratios,
    target_device,
)

PACKAGES = {"sb3": ("stable_baselines3",), "sbx": ("sbx-rl", "jax")}
"""Whose versions are recorded."""


@dataclass
class Args:
    algorithm: Literal[tuple(ALGORITHMS)] = "ppo_continuous_action"
    """our eager reference of the algorithm"""
    ours: tuple[str, ...] | None = None
    """SCRIPT[:MODE] each, as in compare; by default the reference and its fast sibling in every mode of this machine"""
    peers: tuple[Literal[tuple(PEERS)], ...] = tuple(PEERS)
    """whom to measure: sb3, sbx"""
    peer_threads: tuple[int, ...] = (0, 1)
    """CPU threads to try for the peers; 0 is the library's own choice"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one round with each"""
    total_timesteps: int = 40_960
    """environment steps of a run"""
    num_envs: int = 1
    """environments stepped together"""
    env_backend: EnvBackend | None = None
    """for our fast rungs, by default their own; the peers and our references step gymnasium"""
    amp: tuple[Literal["none", "bf16"], ...] = ("none",)
    """--amp of our compiled runs, a row with each, as in `none bf16`; the peers and our other runs stay float32"""
    runs_dir: str = "runs"
    """folder of the default --out"""
    out: str | None = None
    """folder for the results and the run directories; by default RUNS_DIR/peers/TIME"""
    script_args: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = ()
    """flags for every script and peer"""


def main(args: Args) -> int:
    require_distinct(args, "seeds", "peers", "peer_threads", "amp")
    check_script_args(args.script_args, reserved=("--num-envs", "--env-backend", "--num-threads", "--amp"))
    for peer in args.peers:
        if peer not in ALGORITHMS[args.algorithm].peers:
            remedy = " ".join(ALGORITHMS[args.algorithm].peers)
            raise bad("peers", args.peers, f"{peer} has no {args.algorithm}; name --peers {remedy}")
        if importlib.util.find_spec(PEERS[peer]) is None:
            raise UsageError(f"{PEERS[peer]} is not installed; pip install -r requirements/requirements-peers.txt")
    device = target_device(args.script_args)
    flags = [f"--total-timesteps={args.total_timesteps}", f"--num-envs={args.num_envs}", *args.script_args]
    ours = contenders_of(
        args.ours or (args.algorithm, f"{args.algorithm}_torchcompile"),
        "ours",
        device,
        fast_flags=[*flags, *([f"--env-backend={args.env_backend}"] if args.env_backend else [])],
        reference_flags=flags,
        amp=args.amp,
    )
    for contender in ours:
        require_valid(contender)
    theirs = {peer: peer_contenders(peer, args.algorithm, args.peer_threads, flags) for peer in args.peers}
    out = results_folder(args, "peers")

    trials = run_trials([*itertools.chain(*theirs.values()), *ours], args.seeds, out / "runs")

    settings = {
        peer: {contender.label: median_sps(trials, contender.label) for contender in contenders}
        for peer, contenders in theirs.items()
    }
    best = {peer: max(speeds, key=speeds.get) for peer, speeds in settings.items()}
    rows = summarize(trials, [*best.values(), *(contender.label for contender in ours)], best)
    packages = [package for peer in args.peers for package in PACKAGES[peer]]
    record = {
        **benchmark_record("peers", device, packages),
        "rows": rows,
        "peer_settings": settings,
        "runs": [asdict(trial) for trial in trials],
    }
    text = f"{title(args, record)}\n\n{render_table(rows, settings)}"
    write_results(out, "peers", record, text, draw(title(args, record), rows))
    return exit_code(trials)


def peer_contenders(peer: str, algorithm: str, threads: Sequence[int], flags: Sequence[str]) -> list[Contender]:
    """One contender for each thread setting of a peer."""
    command = (sys.executable, "-m", "leanrl.tools.peer_worker", peer, algorithm, *flags)
    return [
        Contender(f"{peer}, {n} thread{'s' * (n > 1)}" if n else f"{peer}, default threads", (*command, flag))
        for n, flag in ((n, f"--num-threads={n}") for n in threads)
    ]


def median_sps(trials: Sequence[Trial], label: str) -> float:
    """The middle speed of a contender's rounds; 0 where all failed."""
    return statistics.median(measured(trials, label, "sps").values() or [0.0])


def summarize(trials: Sequence[Trial], labels: Sequence[str], best: dict[str, str]) -> list[dict]:
    """One row a contender: its speed in each round, and by how much it is faster than each peer at its best."""
    return [
        {
            "who": label,
            "sps": list(measured(trials, label, "sps").values()),
            "median_sps": median_sps(trials, label),
            "ratios": {
                peer: statistics.median(ratios)
                for peer, baseline in best.items()
                if (ratios := sps_ratios(trials, label, baseline))
            },
            "warmup_seconds": list(measured(trials, label, "warmup_seconds").values()),
            "peak_memory_mb": peak_memories(trials, label),
            "failures": [trial.failure for trial in trials if trial.label == label and trial.failure],
        }
        for label in labels
    ]


def render_table(rows: Sequence[dict], settings: dict[str, dict[str, float]]) -> str:
    """The rows as a markdown table, with its legend and the speeds of every thread setting of the peers."""
    cells = [
        (
            row["who"] + failure_note(row["failures"]),
            " ".join(f"{sps:,.0f}" for sps in row["sps"]) or "-",
            f"{row['median_sps']:,.0f}",
            *(f"{row['ratios'][peer]:.2f}x" if peer in row["ratios"] else "-" for peer in settings),
            f"{statistics.median(row['warmup_seconds']):.1f}" if row["warmup_seconds"] else "-",
            f"{statistics.median(row['peak_memory_mb']):,.0f}" if row["peak_memory_mb"] else "-",
        )
        for row in rows
    ]
    header = ("program", "sps of each round", "median sps", *(f"vs {p}" for p in settings), "warm-up s", "peak MB")
    speeds = "; ".join(f"{label} {sps:,.0f}" for tried in settings.values() for label, sps in tried.items())
    return (
        f"{markdown_table(header, cells)}\n\n"
        "sps: environment steps per second after warm-up; peak MB: RAM that the run held at most; ratios, warm-up and "
        "peak: medians over rounds.\n"
        f"Each peer with its fastest thread setting, of these median sps: {speeds}."
    )


def title(args: Args, record: dict) -> str:
    """What was run, and on what."""
    env_ids = sorted({run["args"]["args"]["env_id"] for run in record["runs"] if run["args"]})
    packages = [package for peer in args.peers for package in PACKAGES[peer]]
    versions = [f"{package} {record['machine']['versions'][package]}" for package in packages]
    task = ", ".join([args.algorithm, *env_ids, f"{args.num_envs} environment{'s' * (args.num_envs > 1)}"])
    return f"{task}\n{describe_machine(record['machine'])}, {', '.join(versions)}"


def draw(title: str, rows: Sequence[dict]):
    """The figure: a bar for each row, a dot for each round."""
    figure = new_figure(10, max(3.6, 1.4 + 0.7 * len(rows)))
    notes = [
        f"{row['median_sps']:,.0f}  ({', '.join(f'{ratio:.1f}x {peer}' for peer, ratio in row['ratios'].items())})"
        for row in rows
    ]
    axes = figure.subplots()
    draw_bars(
        axes,
        labels=[row["who"] for row in rows],
        lengths=[row["median_sps"] or None for row in rows],
        points=[row["sps"] for row in rows],
        notes=notes,
        title="Environment steps per second",
    )
    figure.suptitle(title, fontsize=11)
    return figure


if __name__ == "__main__":
    run_tool(main, Args)
