"""A training run: its directory, log points, progress, checkpoints, clock and summary."""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from leanrl.support.checkpoints import load_last_checkpoint, open_atomically, save_atomically, save_checkpoint
from leanrl.support.cli import read_args_json, run_directory
from leanrl.support.devices import available_cores, cpu_name, has_bf16_units, synchronize_stream
from leanrl.support.errors import bad
from leanrl.support.evaluation import play
from leanrl.support.signals import StopRequest
from leanrl.support.tracking import Tracker

# Attributes of Run that checkpoints hold, and the flags and attributes in summary.json.
COUNTERS = "optimizer_steps", "episodes", "last_returns", "new_returns", "new_lengths", "sps_before"
COUNTERS += "warmup_seconds", "snapshots_due", "wall_seconds", "training_seconds"
SUMMARY_FLAGS = "env_id", "seed", "num_envs", "compile", "cudagraphs", "one_graph"
SUMMARY_RESULTS = "global_step", "optimizer_steps", "episodes", "episodic_return", "wall_seconds", "warmup_seconds"
VERSIONED_PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "envpool", "mujoco")


def say(line: str) -> None:
    """Prints ``line``. If stdout is broken (Ctrl-C also ends a ``tee`` behind it), all further output is discarded."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json_atomically(path: Path, content: dict) -> None:
    with open_atomically(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def machine_facts(device: torch.device) -> dict:
    """Git commit, package versions, device, CPU cores and precision, for ``args.json`` and benchmark records."""
    # "-dirty" is appended if a file differs from the commit. A copy without .git is given its commit in GIT_COMMIT.
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    installed = {name: importlib.metadata.version(name) for name in VERSIONED_PACKAGES if find_spec(name)}
    return {
        "git_commit": commit or os.environ.get("GIT_COMMIT") or None,
        # The module knows its local build ("2.13.0+cpu"), which the metadata may not.
        "versions": {"python": platform.python_version(), **installed, "torch": torch.__version__},
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu_cores": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "mkldnn_matmul_fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "cudnn_conv_fp32_precision": torch.backends.cudnn.conv.fp32_precision,
    }


def rng_state(device: torch.device) -> dict:
    """Every random generator's state, in types that a ``weights_only`` checkpoint can hold."""
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    state = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict, device: torch.device) -> None:
    """Restores what ``rng_state`` returned, except a CUDA state if the run has moved to a CPU or come from one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch (all devices), and restricts cuDNN to deterministic convolutions.

    Raises:
        UsageError: NumPy does not take this seed.
    """
    if not 0 <= seed < 2**32:
        raise bad("seed", seed, "must be between 0 and 2**32 - 1")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


class Run:
    """Context manager around one training run; it owns everything on disk and on the terminal.

    Args:
        args: the script's arguments (a ``RunArgs``), already validated.
        script_file: ``__file__`` of the script.
        device: where the learner runs.
        total_steps: environment steps at which the run ends.

    Attributes:
        dir: the run directory.
        global_step: environment steps so far; the script advances it.
        optimizer_steps: gradient steps so far; the script advances it.
        resumed: state saved by ``checkpoint``, or None on a fresh start.
        model: function that returns what the script's ``load_policy`` needs; set by the script.

    Raises:
        UsageError: the directory exists (without ``--resume``), cannot be written, or holds no readable checkpoint.
    """

    def __init__(self, args, script_file: str, device: torch.device, total_steps: int) -> None:
        self.args = args
        self.script = Path(script_file).stem
        self.device = device
        self.total_steps = total_steps
        self.global_step = 0
        self.optimizer_steps = 0
        self.episodes = 0
        self.warmup_seconds = 0.0
        self.last_returns: list[float] = []
        self.new_returns: list[float] = []
        self.new_lengths: list[int] = []
        self._identity = {"script": self.script, "env_id": args.env_id}
        self._started = time.perf_counter()
        self._earlier_training_seconds = 0.0
        self._clock_start: tuple[float, int] | None = None
        self.sps_before = 0.0
        self._stop = StopRequest()
        self.snapshots_due = 0
        self.model: Callable[[], dict] | None = None
        self._summary: dict | None = None

        if args.resume is not None:
            self.dir = Path(args.resume)
            self.resumed = self._load()
            if self.global_step > total_steps:
                there = f"the run is already at step {self.global_step}"
                raise bad("total_timesteps", args.total_timesteps, f"{there}; give a later step as the end of the run")
        else:
            self.resumed = None
            if args.run_name is None:
                # Nanoseconds: several runs may start at once.
                args.run_name = f"{args.env_id.replace('/', '__')}__{self.script}__{args.seed}__{time.time_ns()}"
            self.dir = run_directory(args)
            try:
                self.dir.mkdir(parents=True, exist_ok=True)
                # A run that was killed before it wrote args.json does not count.
                if (self.dir / "args.json").exists():
                    raise bad("run_name", args.run_name, f"{self.dir} exists; continue it with --resume {self.dir}")
            except OSError as error:
                raise bad("runs_dir", args.runs_dir, f"cannot be written ({error.strerror})") from None
        self._last_checkpoint = self._last_log = self.global_step
        self._first_optimizer_step = self.optimizer_steps

    def _load(self) -> dict | None:
        loaded = load_last_checkpoint(self.dir / "checkpoints", self._identity)
        if loaded is None:
            if (self.dir / "summary.json").exists():
                raise bad("resume", self.dir, "the run has ended, and its checkpoints are gone")
            print(f"{self.dir}: no checkpoint was written yet, starting from the first step", file=sys.stderr)
            return None
        self.global_step, content = loaded
        counters = content["run"]
        self._started -= counters.pop("wall_seconds")
        self._earlier_training_seconds = counters.pop("training_seconds")
        vars(self).update(counters)
        self._rng = deepcopy(content["rng"])  # a tensor of the file would keep all of it mapped
        return content["script"]

    def restore_rng(self) -> None:
        """On a resumed run, restores every random generator from the checkpoint; call it right before the loop."""
        if self.resumed is not None:
            set_rng_state(self._rng, self.device)

    def __enter__(self) -> "Run":
        arguments = dataclasses.asdict(self.args)
        facts = {"script": self.script, "args": arguments, "command": sys.argv, **machine_facts(self.device)}
        if self.args.resume is not None:
            # A later resume ends where this one does. Everything else stays as it was when the run started.
            facts = read_args_json(self.dir)
            ends = ("total_timesteps", "max_seconds", "target_return")
            facts["args"] |= {name: arguments[name] for name in ends if name in arguments}
        try:
            write_json_atomically(self.dir / "args.json", facts)
        except OSError as error:
            name = "runs_dir" if self.args.resume is None else "resume"
            raise bad(name, self.dir, f"cannot be written ({error.strerror})") from None
        self._tracker = Tracker(self.dir, self.args, self.global_step)
        self._stop.__enter__()
        if self.args.amp == "bf16" and self.device.type == "cpu" and not has_bf16_units():
            print("warning: --amp bf16: this processor has no bf16 units, float32 is faster on it", file=sys.stderr)
        say(f"{self.script}: {self.args.env_id}, seed {self.args.seed}, {self.device}, in {self.dir}")
        # Without tqdm's own rate, which includes the warm-up. (So does its time left, but that matters less and less.)
        bar_format = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        counts = {"total": self.total_steps, "initial": self.global_step, "unit_scale": True}
        # disable=None: only on a terminal.
        self._progress = tqdm(desc=self.script, bar_format=bar_format, disable=None, **counts)
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        self._progress.close()
        self._tracker.close(failed=self._summary is None)
        self._stop.__exit__()

    @contextmanager
    def warmup(self, errors_end: bool = False):
        """Times what happens once, before the loop: compilation and capture.

        Args:
            errors_end: raise errors even if a stop was requested, which may have caused them.
        """
        start = time.perf_counter()
        try:
            yield
        except Exception:
            # Ctrl-C reaches the C++ compiler too, whose death looks like an error here.
            if errors_end or not self._stop.requested:
                raise
        synchronize_stream(self.device)
        self.warmup_seconds += time.perf_counter() - start

    def start_clock(self) -> None:
        """Marks the end of the warm-up: speed is measured from here.

        If it is called again, say when learning starts, the time since the previous call counts as warm-up too.
        """
        synchronize_stream(self.device)
        if self._clock_start is not None:
            self.sps_before = self.sps()
            self.warmup_seconds += time.perf_counter() - self._clock_start[0]
        self._clock_start = (time.perf_counter(), self.global_step)

    def sps(self) -> float:
        """Environment steps per second of wall clock since ``start_clock``; synchronises the device's stream.

        If there has been no step since, the speed before ``start_clock``.
        """
        synchronize_stream(self.device)
        start, first_step = self._clock_start
        if self.global_step == first_step:
            return self.sps_before
        return (self.global_step - first_step) / max(time.perf_counter() - start, 1e-9)

    @property
    def wall_seconds(self) -> float:
        """Seconds since this object was made, including those before a resume."""
        return time.perf_counter() - self._started

    @property
    def training_seconds(self) -> float:
        """Seconds since ``start_clock``, including those before a resume.

        This process's seconds count only after its first update: until then the clock may be started again.
        """
        if self.optimizer_steps == self._first_optimizer_step:
            return self._earlier_training_seconds
        return self._earlier_training_seconds + time.perf_counter() - self._clock_start[0]

    @property
    def seconds_left(self) -> float:
        """What is left of ``--max-seconds``, infinite without it; does not synchronise the device."""
        return math.inf if self.args.max_seconds is None else self.args.max_seconds - self.training_seconds

    @property
    def episodic_return(self) -> float | None:
        """Mean return of the last 100 training episodes; None before the first."""
        return float(np.mean(self.last_returns)) if self.last_returns else None

    @property
    def stop_requested(self) -> bool:
        """Whether the run is to end after this update: a signal asked for it, or its time is up."""
        return self._stop.requested or self.seconds_left <= 0

    def request_stop(self) -> None:
        """Stops the run as a signal would, because another of its processes was asked to stop."""
        self._stop.requested = True

    def record_episodes(self, returns, lengths) -> None:
        """Counts finished episodes: undiscounted returns of raw rewards, lengths in environment steps."""
        self.episodes += len(returns)
        self.new_returns += map(float, returns)
        self.new_lengths += map(int, lengths)
        self.last_returns += map(float, returns)
        del self.last_returns[:-100]

    def log(self, metrics: dict[str, float]) -> None:
        """Writes a log point at ``global_step``: ``metrics``, speed, and the episodes finished since the last one.

        Raises:
            RuntimeError: a loss is not finite, or a ratio of policies is not (its gradient is NaN).
        """
        sps = self.sps()
        point = {"charts/SPS": sps, "charts/wall_seconds": self.wall_seconds}
        if self.new_returns:
            point["charts/episodic_return"] = float(np.mean(self.new_returns))
            point["charts/episodic_length"] = float(np.mean(self.new_lengths))
            point["charts/episodes"] = self.episodes
            self.new_returns, self.new_lengths = [], []
        point.update({key: float(value) for key, value in metrics.items()})
        self._tracker.log(self.global_step, point)
        self._last_log = self.global_step
        for key, value in metrics.items():
            if key.endswith(("_loss", "approx_kl")) and not math.isfinite(value):
                raise RuntimeError(f"training diverged: {key} is {value} at step {self.global_step}")
        every = self.args.snapshot_seconds
        if every is not None and self.wall_seconds // every > self.snapshots_due:
            self.snapshots_due = self.wall_seconds // every
            self._save_snapshot()
        recent = "-" if self.episodic_return is None else f"{self.episodic_return:.1f}"
        self._progress.set_postfix_str(f"return {recent}, {sps:,.0f} sps", refresh=False)
        self._progress.update(self.global_step - self._progress.n)
        if self._progress.disable:
            left = max(0.0, min((self.total_steps - self.global_step) / max(sps, 1e-9), self.seconds_left))
            say(f"step {self.global_step:,}/{self.total_steps:,}  return {recent}  {sps:,.0f} sps  {left:,.0f} s left")

    def log_due(self) -> bool:
        """Whether a multiple of ``--log-every`` steps has been passed since the last log point."""
        return self.global_step // self.args.log_every > self._last_log // self.args.log_every

    def checkpoint_due(self) -> bool:
        """Whether ``--checkpoint-every`` steps have passed since the last checkpoint."""
        every = self.args.checkpoint_every
        return every is not None and self.global_step - self._last_checkpoint >= every

    def checkpoint(self, state: dict) -> None:
        """Saves the script's ``state`` with the counters and every random generator."""
        self.sps_before = self.sps()
        counters = {name: getattr(self, name) for name in COUNTERS}
        content = {"script": state, "run": counters, "rng": rng_state(self.device)}
        save_checkpoint(self.dir / "checkpoints", self.global_step, self._identity, content)
        self._last_checkpoint = self.global_step

    def _save_snapshot(self) -> None:
        """Writes the current model, with ``time.time()``, to ``snapshots/step_....pt``."""
        path = self.dir / "snapshots" / f"step_{self.global_step:012d}.pt"
        if self.model is not None and not path.exists():
            path.parent.mkdir(exist_ok=True)
            save_atomically({"model": self.model(), "global_step": self.global_step, "time": time.time()}, path)

    def finish(self, state: dict) -> dict:
        """Writes the last checkpoint, ``summary.json`` and what the flags ask for; returns the summary.

        Args:
            state: of the script, as for ``checkpoint``.
        """
        if self.args.snapshot_seconds is not None:
            self._save_snapshot()
        self.checkpoint(state)
        summary = self._summary = {
            "script": self.script,
            **{name: getattr(self.args, name, False) for name in SUMMARY_FLAGS},
            "device": str(self.device),
            **{name: getattr(self, name) for name in SUMMARY_RESULTS},
            "sps": self.sps_before,
            "interrupted": self._stop.requested and self.global_step < self.total_steps,
        }
        write_json_atomically(self.dir / "summary.json", summary)
        if self.model is None:
            return summary
        if self.args.save_model or self.args.capture_video:
            save_atomically({"model": self.model()}, self.dir / "model.pt")
        if self.args.capture_video and not self._stop.requested:
            self._stop.__exit__()  # all is saved, so a signal may end the filming
            say("filming one episode")
            video = self.dir / "videos" / "episode.mp4"
            play(self.dir, episodes=1, video=video)
            say(f"video: {video}")
        if not self._progress.disable:
            self._progress.close()
            run_dir = shlex.quote(str(self.dir))
            go_on = f"; continue: ./run.sh {self.script} --resume {run_dir}" if summary["interrupted"] else ""
            playing = f"./run.sh evaluate {run_dir}" if (self.dir / "model.pt").exists() else "needs --save-model"
            print(f"{self.dir}: play: {playing}{go_on}", file=sys.stderr)
        return summary

    def evaluate(self, episodes: int) -> None:
        """After ``finish``: plays the saved model and logs the mean return, unless a signal asked to stop."""
        if not self._stop.requested:
            score = float(np.mean(play(self.dir, episodes)))
            self._tracker.log(self.global_step, {"evaluation/episodic_return": score})
            say(f"evaluation: mean return {score:.1f} over {episodes} episodes")
