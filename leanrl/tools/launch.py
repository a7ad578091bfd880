"""Starts a script on several environments with several seeds, on this machine or as a SLURM array.

    python -m leanrl.tools.launch --env-ids Breakout-v5 Pong-v5 --num-seeds 3 --workers 2 -- \\
        leanrl/cleanba_ppo.py --device cpu --compile --save-model
    python -m leanrl.tools.launch --env-ids Breakout-v5 --slurm-template leanrl/tools/cleanba.slurm \\
        --slurm-ntasks 2 --slurm-gpus-per-task 2 --dry-run -- \\
        leanrl/cleanba_ppo.py --distributed --learner-device-ids 1 --policy-lag 1

The script and its flags come after --; --env-id, --seed and --run-name are added. --dry-run prints what would be run
or submitted. A SLURM template may name {array} {ntasks} {nodes} {gpus_per_task} {cpus_per_gpu} {commands}.
"""

import math
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from leanrl.support.errors import UsageError, bad, require_at_least
from leanrl.tools.common import run_tool
from leanrl.tools.trials import REPOSITORY, SCRIPTS, Deadline, check_flags, require_distinct, run_child

ADDED = ("--env-id", "--seed", "--run-name", "--resume")
SIZES = ("num_seeds", "workers", "slurm_ntasks", "slurm_nodes", "slurm_gpus_per_task", "slurm_cpus_per_gpu")


@dataclass
class Args:
    env_ids: tuple[str, ...]
    """environments"""
    num_seeds: int = 3
    """runs of each environment"""
    start_seed: int = 1
    """the first seed"""
    workers: int = 1
    """runs at a time on this machine"""
    slurm_template: Annotated[Path | None, tyro.conf.arg(aliases=["--slurm-template-path"])] = None
    """write a SLURM array job from this file and submit it, instead of running here"""
    slurm_ntasks: int = 1
    """tasks of a run; with --distributed, its groups"""
    slurm_nodes: int = 1
    """nodes of a run"""
    slurm_gpus_per_task: int = 1
    """devices of a group"""
    slurm_cpus_per_gpu: int = 10
    """CPU cores for each device"""
    runs_dir: str = "runs"
    """where the job file and its output go"""
    dry_run: bool = False
    """print what would be run or submitted, and do nothing"""
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- SCRIPT FLAGS")] = ()
    """the script and its flags"""


def commands(args: Args, stamp: str) -> list[list[str]]:
    """One command line per run: every environment with the first seed, then with the next.

    Raises:
        UsageError: there is no such script, or a flag is one that is added here.
    """
    known = sorted(path.name for path in SCRIPTS.glob("[!_]*.py"))
    name = Path(args.command[0]).name if args.command else ""
    if name not in known:
        raise UsageError(f"-- {name}: name a script after --; choose from {', '.join(known)}")
    check_flags(args.command[1:], ADDED)
    script = SCRIPTS / name
    return [
        [
            *(sys.executable, str(script), *args.command[1:]),
            *("--env-id", env_id, "--seed", str(seed)),
            *("--run-name", f"{env_id.replace('/', '_')}__{script.stem}__{seed}__{stamp}"),
        ]
        for seed in range(args.start_seed, args.start_seed + args.num_seeds)
        for env_id in args.env_ids
    ]


def slurm_job(args: Args, lines: list[list[str]]) -> str:
    """The filled-in template. UsageError if it cannot be read or has an unknown placeholder."""
    fields = {
        "array": f"0-{len(lines) - 1}",
        "ntasks": args.slurm_ntasks,
        "nodes": args.slurm_nodes,
        "gpus_per_task": args.slurm_gpus_per_task,
        "cpus_per_gpu": args.slurm_cpus_per_gpu,
        "commands": "\n".join(f"  {shlex.quote(shlex.join(line))}" for line in lines),
    }
    try:
        return args.slurm_template.read_text().format(**fields)
    except OSError as error:
        raise bad("slurm_template", args.slurm_template, f"cannot be read ({error.strerror})") from None
    except (KeyError, IndexError, ValueError) as error:
        known = " ".join(f"{{{name}}}" for name in fields)
        raise bad("slurm_template", args.slurm_template, f"cannot be filled in ({error}); it may use {known}") from None


def submit(args: Args, job: str, stamp: str) -> int:
    """Writes the job file and hands it to sbatch; returns its exit code."""
    path = Path(args.runs_dir) / "slurm" / f"{stamp}.slurm"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(job)
    output = f"--output={path.parent.resolve()}/%A_%a.out"
    try:
        return subprocess.run(["sbatch", output, str(path.resolve())], cwd=REPOSITORY).returncode
    except FileNotFoundError:
        raise bad("slurm_template", args.slurm_template, f"sbatch is not here; submit {path} elsewhere") from None


def main(args: Args) -> int:
    """Returns 0 if every run ended with 0, else 1; for a SLURM job, sbatch's exit code."""
    require_distinct(args, "env_ids")
    require_at_least(args, 1, *SIZES)
    require_at_least(args, 0, "start_seed")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    lines = commands(args, stamp)
    job = args.slurm_template and slurm_job(args, lines)
    if args.dry_run:
        print(job or "\n".join(map(shlex.join, lines)))
        return 0
    if job:
        return submit(args, job, stamp)

    deadline = Deadline(math.inf)

    def run(line: list[str]) -> bool:
        print(shlex.join(line), flush=True)
        code, _ = run_child(line, deadline)
        if code:
            print(f"{shlex.join(line)}: ended with exit code {code}", file=sys.stderr, flush=True)
        return code == 0

    with ThreadPoolExecutor(args.workers) as pool:
        try:
            succeeded = list(pool.map(run, lines))
        finally:
            deadline.at = 0.0  # after an error the children too are to stop
    print(f"{sum(succeeded)} of {len(lines)} runs succeeded")
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    run_tool(main, Args)
