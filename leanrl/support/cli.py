"""The command line shared by all scripts: common flags, resuming, one-line errors."""

import atexit
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import tyro

from leanrl.support.errors import UsageError, bad, typed

MAY_CHANGE_ON_RESUME = {"total_timesteps", "max_seconds", "checkpoint_every", "resume", "device", "track", "compile"}
MAY_CHANGE_ON_RESUME |= {"cudagraphs", "one_graph", "distributed", "timeout", "start_timeout", "target_return"}


@dataclasses.dataclass
class RunArgs:
    """Flags for records, stopping and resuming; every script's ``Args`` inherits them."""

    run_name: str | None = None
    """name of the run directory; by default ENV_ID__SCRIPT__SEED__TIME"""
    runs_dir: str = "runs"
    """folder that holds the run directories"""
    checkpoint_every: int | None = 100_000
    """environment steps between checkpoints (one is always written at the end); None writes none before the end"""
    resume: str | None = None
    """run directory to resume from its last checkpoint, with the arguments it was started with"""
    max_seconds: float | None = None
    """stop after this many seconds of training, resumes included, counted from the end of the warm-up"""
    snapshot_seconds: float | None = None
    """save the model to snapshots/ at the first log point after each multiple of this many seconds since the start,
    and at the end, for `python -m leanrl.tools.speedrun`"""
    save_model: bool = False
    """write model.pt at the end, which `python -m leanrl.tools.evaluate RUN_DIR` plays"""
    capture_video: bool = False
    """record a video of one episode of the trained policy at the end, as an mp4 in the run directory. The backend that
    stepped the environments renders it, for MuJoCo always Gymnasium; if it cannot, the run is refused at the start"""
    track: bool = False
    """also log to Weights & Biases (offline when no key is configured)"""
    wandb_project_name: str = "leanrl"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B team or user"""


def read_args_json(run_dir: Path, flag: str = "") -> dict:
    """The contents of a run directory's ``args.json``; UsageError, starting with ``flag``, if ``run_dir`` has none."""
    path = run_dir / "args.json"
    try:
        content = json.loads(path.read_text())
        _ = content["script"], content["args"]["env_id"]
    except OSError as error:
        raise UsageError(f"{flag}{run_dir}: not a run directory ({path}: {error.strerror})") from None
    except (ValueError, LookupError, TypeError):  # not text, not JSON, or JSON of something else
        raise UsageError(f"{flag}{path}: was not written by a training script") from None
    return content


def run_directory(args: RunArgs) -> Path:
    """``RUNS_DIR/RUN_NAME``; UsageError unless the name is that of a single folder."""
    if args.run_name in ("", ".", "..") or "/" in args.run_name:
        raise bad("run_name", args.run_name, "must be the name of one folder, which is made in --runs-dir")
    return Path(args.runs_dir) / args.run_name


def restarted(args_json: Path) -> bool:
    """Whether torchrun or SLURM restarted this process, after a failure or a requeue, for the run of ``args_json``."""
    if not os.path.exists(args_json):  # Path.exists may raise
        return False
    if int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0) > 0:
        return True
    # torchrun also restarts a run that was refused because its directory exists: args.json is then older than torchrun.
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0
    return again and args_json.stat().st_mtime >= psutil.Process(os.getppid()).create_time()


def parse_args(args_type: type[RunArgs], script: str, argv: list[str] | None = None) -> RunArgs:
    """Reads the command line into ``args_type``.

    With ``--resume RUN_DIR`` the arguments of that run are the defaults, and only those in MAY_CHANGE_ON_RESUME may
    differ from them. A process restarted by torchrun or SLURM resumes its ``--run-name`` without the flag.

    Raises:
        UsageError: ``--resume`` names no run, or one of another script; or a flag that must stay was changed.
    """
    text = sys.modules[args_type.__module__].__doc__
    parse = partial(tyro.cli, args_type, args=argv, prog=f"python leanrl/{script}.py", description=text)
    args = parse()
    resume = args.resume
    if resume is None:
        if args.run_name is None or not restarted(run_directory(args) / "args.json"):
            return args
        resume = str(run_directory(args))
    stored = read_args_json(Path(resume), "--resume ")
    if stored["script"] != script:
        raise bad("resume", resume, f"is a run of {stored['script']}, not of {script}")
    names = {f.name for f in dataclasses.fields(args_type)}
    first = args_type(**{name: value for name, value in stored["args"].items() if name in names})
    # The run directory may have been moved since the run was started.
    first.runs_dir, first.run_name = str(Path(resume).resolve().parent), Path(resume).resolve().name
    # Parsed again, so that flags left out keep their stored values.
    args = parse(default=first)
    args.resume = resume
    if run_directory(args).resolve() == Path(resume).resolve():  # the same folder, written differently
        args.runs_dir = first.runs_dir
    for name, was in vars(first).items():
        if getattr(args, name) != was and name not in MAY_CHANGE_ON_RESUME:
            raise bad(name, getattr(args, name), f"cannot change on --resume; the run was started with {typed(was)}")
    return args


def run_script(main: Callable, args_type: type[RunArgs], script_file: str) -> None:
    """Entry point of every script: parses, runs ``main(args)``; a UsageError is one line on stderr and exit code 2."""
    atexit.register(gc.freeze)  # or the garbage collection at exit would traverse all compiled code, for a second
    try:
        main(parse_args(args_type, Path(script_file).stem))
    except UsageError as error:
        report_usage_error(error, script_file)
        raise SystemExit(2) from None


def report_usage_error(error: UsageError, script_file: str) -> None:
    """Prints ``error`` as one line on stderr."""
    # A library's message may span several lines.
    print(f"{Path(script_file).name}: {' '.join(str(error).split())}", file=sys.stderr)
