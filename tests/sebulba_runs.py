"""Running the distributed scripts as real processes, several at a time."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from scripts import SOURCE, course, run, wait_until

from leanrl.sebulba.supervisor import local_store

DISTRIBUTED = ["cleanba_ppo", "cleanba_impala"]
# What torchrun would tell the only rank of a run.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
ENV = {name: value for name, value in os.environ.items() if name not in ALONE} | {"OMP_NUM_THREADS": "1"}
# The processes that a test has started; conftest.py ends what is left of them.
LAUNCHED = []


def needs_gpus(number: int) -> pytest.MarkDecorator:
    """Skips a test on machines with fewer."""
    return pytest.mark.skipif(torch.cuda.device_count() < number, reason=f"needs {number} GPUs")


def tiny(folder: Path, *flags) -> list[str]:
    """Flags of a run of updates that take milliseconds; ``flags`` come last and win."""
    ours = ["--device=cpu", "--env-id=CartPole-v1", "--local-num-envs=8", "--num-steps=16", "--num-minibatches=2"]
    ours += ["--num-threads=1", "--env-threads=1", "--log-frequency=1", f"--runs-dir={folder}", "--run-name=run"]
    return [*ours, *map(str, flags)]


def launch(script: str, *flags, environ=None, prefix=(sys.executable,)) -> subprocess.Popen:
    """Starts a script; its output, both streams, is in ``stdout``."""
    command = [*prefix, SOURCE / f"{script}.py", *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    LAUNCHED.append(subprocess.Popen(command, env={**ENV, **(environ or {})}, **streams))
    return LAUNCHED[-1]


def finish(process: subprocess.Popen, seconds: float = 120) -> tuple[int, str]:
    """Waits for the end: exit code and output."""
    out, _ = process.communicate(timeout=seconds)
    return process.returncode, out


def end(process: subprocess.Popen) -> None:
    """Kills what is left of a run."""
    if process.poll() is None:
        for child in ranks_of(process):
            child.kill()
        process.kill()
        process.wait()


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The processes of a launcher's ranks, by rank."""
    children = [c for c in psutil.Process(launcher.pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def wait_for_log(run_dir: Path, process: subprocess.Popen, points: int = 1, seconds: float = 120) -> None:
    """Waits for so many log points of a run that is under way."""
    wait_until(lambda: len(course(run_dir)) >= points, process, seconds)


def last_line(out: str) -> str:
    return out.strip().splitlines()[-1]


def alive(processes: list[psutil.Process]) -> list[int]:
    """Those that still run."""
    return [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def run_alone(monkeypatch, script: str, *flags, **environ) -> int:
    """Runs a rank, by default the only one, in this process, as torchrun would start it; returns the exit code.

    ``environ`` are torchrun's variables that differ from those of the only rank.
    """
    with monkeypatch.context() as patch:
        for name, value in {**ALONE, **environ}.items():
            patch.setenv(name, value)
        patch.setattr(os, "_exit", sys.exit)
        try:
            return run(script, *flags)
        finally:
            if torch.distributed.is_initialized():  # a failed run's, which would be in the way of the next
                torch.distributed.destroy_process_group()


def run_both(monkeypatch, script: str, *flags, meanwhile=lambda process: None, rank: int = 0) -> int:
    """Runs the two ranks of a layout, ``rank`` in this process; returns the exit code of both.

    Args:
        meanwhile: is called with the process of the other one.
    """
    store = local_store()
    # The last: no rank holds the store.
    environ = {"WORLD_SIZE": "2", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = launch(script, *flags, environ={**ALONE, **environ, "RANK": str(1 - rank)})
    meanwhile(process)
    code = run_alone(monkeypatch, script, *flags, RANK=str(rank), **environ)
    others_code, out = finish(process)
    assert others_code == code, out
    return code
