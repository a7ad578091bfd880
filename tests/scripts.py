"""Running the training scripts: in this process where that will do, as real processes where signals are sent."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leanrl.support.cli import run_script

SOURCE = Path(__file__).parents[1] / "leanrl"
REFERENCES = ["ppo_continuous_action"]
SCRIPTS = [name for r in REFERENCES for name in (r, f"{r}_torchcompile") if (SOURCE / f"{name}.py").exists()]
FAST_SCRIPTS = [name for name in SCRIPTS if name.endswith("_torchcompile")]
# Rollouts of 64 steps, 4 gradient steps each.
TINY = ["--env-id=Hopper-v5", "--device=cpu", "--num-steps=64", "--num-minibatches=4", "--update-epochs=1"]


def run(script: str, *flags) -> int:
    """Runs a script in this process and returns its exit code."""
    module = importlib.import_module(f"leanrl.{script}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        try:
            run_script(module.main, module.Args, module.__file__)
        except SystemExit as end:
            return end.code or 0
    return 0


def start_process(script: str, *flags, **kwargs) -> subprocess.Popen:
    """Starts a script as a process of its own; ``kwargs`` are Popen's."""
    return subprocess.Popen([sys.executable, SOURCE / f"{script}.py", *map(str, flags)], **kwargs)


def wait_until(condition, process: subprocess.Popen, seconds: float = 120):
    """Waits until ``condition()`` holds and returns its value; the process must still run then."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None, f"ended with {process.returncode} before it came so far"
        assert time.monotonic() < deadline, f"not so far after {seconds} s"
        time.sleep(0.005)
    assert process.poll() is None, "ended too soon; the test needs a longer run"
    return value


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def files_in(folder: Path) -> dict[Path, bytes | None]:
    """Everything below ``folder``, with the contents of the files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
