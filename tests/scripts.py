"""Running the training scripts: in this process where that will do, as real processes where signals are sent."""

import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from leanrl.support.checkpoints import load_last_checkpoint
from leanrl.support.cli import run_script
from leanrl.support.run import Run
from leanrl.support.tracking import read_metrics
from leanrl.tools.common import run_tool

SOURCE = Path(__file__).parents[1] / "leanrl"
# They learn from rollouts.
ON_POLICY_REFERENCES = ["ppo_continuous_action", "ppo_atari_envpool", "pqn", "pqn_atari_envpool"]
OFF_POLICY_REFERENCES = ["sac_continuous_action", "td3_continuous_action", "fast_sac", "dqn"]
REFERENCES = ON_POLICY_REFERENCES + OFF_POLICY_REFERENCES
ON_POLICY = [name for r in ON_POLICY_REFERENCES for name in (r, f"{r}_torchcompile")]
OFF_POLICY = [name for r in OFF_POLICY_REFERENCES for name in (r, f"{r}_torchcompile")]
SCRIPTS = ON_POLICY + OFF_POLICY
PPO = [name for name in ON_POLICY if name.startswith("ppo")]
ATARI = [name for name in ON_POLICY if "atari" in name]
DISCRETE = [name for name in SCRIPTS if name.startswith(("dqn", "pqn"))]
FAST_SCRIPTS = [name for name in SCRIPTS if name.endswith("_torchcompile")]
ONE_GRAPH_SCRIPTS = [name for name in FAST_SCRIPTS if name.startswith(("sac", "td3", "fast", "ppo_atari"))]
# Atari's slow ones: PPO's fast variant, which stays, uses what they use of support/.
LONG_SCRIPTS = ["ppo_atari_envpool", "pqn_atari_envpool", "pqn_atari_envpool_torchcompile"]
# One of each kind, for what all scripts leave to support/.
KINDS = ["ppo_continuous_action", "td3_continuous_action_torchcompile"]
# Environment steps of ``finished_run``: 15 log points.
FINISHED = 960


def with_long(names: list[str], long=LONG_SCRIPTS) -> list:
    """Parameters of a test: those in ``long`` only run with --all."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


def of(script: str, by_algorithm: dict):
    """What is kept for the algorithm that the script's name begins with."""
    return next(value for algorithm, value in by_algorithm.items() if script.startswith(algorithm))


def tiny_env(script: str) -> str:
    """The environment of tiny runs of ``script``: episodes are short and terminate."""
    if script in ATARI:
        return "Breakout-v5"
    return "CartPole-v1" if script in DISCRETE else "Hopper-v5"


def tiny_num_envs(script: str) -> int:
    """Environments of tiny runs of ``script``."""
    return 4 if script in ATARI else 1


def tiny(script: str) -> list[str]:
    """Flags of a run of seconds, with a log point each 64 steps."""
    flags = ["--device=cpu", "--num-threads=1", f"--env-id={tiny_env(script)}"]
    if script in ON_POLICY:  # rollouts of 64 steps, 4 gradient steps each
        num_envs = tiny_num_envs(script)
        flags += [f"--num-envs={num_envs}", f"--num-steps={64 // num_envs}"]
        return [*flags, "--num-minibatches=4", "--update-epochs=1"]
    # A gradient step each 8 steps from step 48 on.
    flags += ["--num-envs=1", "--learning-starts=48", "--updates-per-step=0.125", "--batch-size=32"]
    flags += ["--buffer-size=1000", "--log-every=64"]
    return [*flags, *(["--target-network-frequency=100"] if script.startswith("dqn") else [])]


def tiny_optimizer_steps(script: str, steps: int) -> int:
    """Gradient steps of a tiny run of so many environment steps."""
    return steps // 64 * 4 if script in ON_POLICY else max(0, steps - 48) // 8


def run(script: str, *flags) -> int:
    """Runs a script in this process and returns its exit code."""
    module = importlib.import_module(f"leanrl.{script}")
    # As in a new process: what an earlier run has set would change how this one rounds.
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        try:
            run_script(module.main, module.Args, module.__file__)
        except SystemExit as end:
            return end.code or 0
    return 0


def run_tiny(script: str, folder: Path, *flags, name: str = "run") -> Path:
    """A tiny run of ``script`` in ``folder / name``, which it returns; ``flags`` come last and win."""
    assert run(script, *tiny(script), "--runs-dir", folder, "--run-name", name, *flags) == 0
    return folder / name


def run_until(script: str, step: int, *flags, after_an_end: bool = False) -> int:
    """``run``, with a SIGTERM from step ``step`` on; with ``after_an_end``, when a step has ended an episode."""
    episodes = 0

    def checkpoint_due(self) -> bool:  # asked once a step, at its end
        nonlocal episodes
        if self.global_step >= step and (self.episodes > episodes or not after_an_end):
            signal.raise_signal(signal.SIGTERM)
        episodes = self.episodes
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "checkpoint_due", checkpoint_due)
        return run(script, *flags)


def start_process(script: str, *flags, **kwargs) -> subprocess.Popen:
    """Starts a script as a process of its own; ``kwargs`` are Popen's."""
    return subprocess.Popen([sys.executable, SOURCE / f"{script}.py", *map(str, flags)], **kwargs)


def wait_until(condition, process: subprocess.Popen, seconds: float = 300):
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


def newest_checkpoint(run_dir: Path) -> tuple[int, dict | None]:
    """``(global_step, state)``, or step 0 where there is none."""
    facts = json.loads((run_dir / "args.json").read_text())
    identity = {"script": facts["script"], "env_id": facts["args"]["env_id"]}
    return load_last_checkpoint(run_dir / "checkpoints", identity) or (0, None)


def course(run_dir: Path) -> list[dict]:
    """The log points, less what depends on the machine's speed."""
    return [
        {key: value for key, value in row.items() if key not in ("charts/SPS", "charts/wall_seconds")}
        for row in read_metrics(run_dir)
    ]


def leaves(state) -> list:
    """All numbers and strings of a checkpoint, to compare."""
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(state)]


def files_in(folder: Path) -> dict[Path, bytes | None]:
    """Everything below ``folder``, with the contents of the files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def run_tool_in_process(monkeypatch, tool, *argv) -> int:
    """What ``python -m leanrl.tools.TOOL ARGV`` exits with."""
    monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        run_tool(tool.main, tool.Args)
    return end.value.code


def cells(table: str) -> list[list[str]]:
    """The body of a markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns do not line up"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
