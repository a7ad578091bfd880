"""The runtime's flags, which both distributed scripts share."""

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from leanrl.sebulba.layout import Layout
from leanrl.support.cli import RunArgs
from leanrl.support.devices import available_cores, resolve_device, update_threads
from leanrl.support.envs import EnvBackend
from leanrl.support.errors import UsageError, bad, require_at_least, require_positive
from leanrl.support.hub import require_hub


@dataclass
class SebulbaArgs(RunArgs):
    """Where things run and when they stop; named as in Cleanba where it has the flag."""

    capture_video: bool = False
    """refused by these scripts: use `python -m leanrl.tools.evaluate RUN_DIR --capture-video` on a saved model"""
    device: str = "auto"
    """auto, cpu or cuda; on cpu the device ids below are virtual devices of this machine"""
    amp: Literal["none", "bf16"] = "none"
    """bf16 runs the networks under autocast, except their last layers"""
    compile: bool = False
    """compile inference and update with torch.compile"""
    cudagraphs: bool = False
    """replay inference and update as CUDA graphs"""
    env_backend: EnvBackend = "envpool"
    """envpool steps the environments on C++ threads; gymnasium steps those of an actor thread one after the other"""
    num_threads: int | None = None
    """CPU threads of a learner; by default all cores if nothing else needs them and its work is large, else 1"""
    env_threads: int | None = None
    """C++ threads of each actor thread's EnvPool; by default its share of the machine's cores"""

    local_num_envs: int = 48
    """environments of each actor thread"""
    num_actor_threads: int = 2
    """actor threads on each actor device"""
    actor_device_ids: tuple[int, ...] = (0,)
    """ids of a group's acting devices"""
    learner_device_ids: tuple[int, ...] = (0,)
    """ids of a group's learning devices; a device in both lists does both in one process"""
    distributed: bool = False
    """this is one of several SLURM tasks, each with its own group"""
    policy_lag: int | Literal["newest"] = 0
    """rollout r is played with the parameters after r - 1 - POLICY_LAG updates; 0 is synchronous. newest: with the
    latest available, at most 2 behind; such runs are not reproducible"""
    num_shards: int | None = None
    """shards of the global batch, each shuffled and normalised on its own; by default one per learner"""
    exact_reduction: bool = False
    """sum gradients in shard order and act one shard at a time: on identical CPUs, results are bitwise equal in all
    layouts with as many environments and shards (set --num-shards; by default there is one shard per learner)"""
    start_timeout: float = 600.0
    """seconds that each step of the start-up may take: imports, meeting the other processes, compilation"""
    timeout: float = 1800.0
    """after start-up, a wait of this many seconds ends the run as stalled; must exceed any update or rollout"""

    log_frequency: int = 10
    """updates between log points"""
    checksum_frequency: int = 100
    """updates between comparisons of the learners' parameters, which end the run if they differ"""
    target_return: float | None = None
    """stop once the mean of the last 100 episodes reaches this"""

    evaluate_episodes: int | None = None
    """play this many episodes with the trained model at the end, and log their mean return"""
    upload_model: bool = False
    """upload the model to the Hugging Face Hub at the end, as ENV_ID-SCRIPT-seedSEED; saves it too"""
    hf_entity: str = ""
    """user or organisation on the Hub; by default whoever is logged in"""

    num_envs: tyro.conf.Suppress[int] = 0
    """total number of environments, filled in once the layout is known"""

    def __post_init__(self) -> None:
        self.save_model = self.save_model or self.upload_model or self.evaluate_episodes is not None
        # Lists come from args.json.
        vars(self).update({name: tuple(x) for name, x in vars(self).items() if isinstance(x, list)})


def flags_digest(args: SebulbaArgs) -> str:
    """A hash of all flags that the processes of a run must have in common."""
    own = {field.name for field in dataclasses.fields(RunArgs)}
    shared = {name: value for name, value in dataclasses.asdict(args).items() if name not in own}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]


def validate_runtime(args: SebulbaArgs) -> None:
    """Raises UsageError on the first of the runtime's flags that cannot work in any layout."""
    require_at_least(args, 1, "num_threads", "env_threads", "log_frequency", "checksum_frequency", "checkpoint_every")
    require_at_least(args, 1, "evaluate_episodes", "start_timeout")
    if args.policy_lag != "newest":
        require_at_least(args, 0, "policy_lag")
    elif args.exact_reduction:
        raise bad("policy_lag", args.policy_lag, "makes every run different; leave out --exact-reduction")
    require_at_least(args, 2, "timeout")  # processes send a heartbeat twice a second
    require_positive(args, "max_seconds", "snapshot_seconds")
    if args.target_return is not None and not math.isfinite(args.target_return):
        raise bad("target_return", args.target_return, "must be a finite number")
    if args.upload_model:
        require_hub()
    if args.capture_video:
        raise UsageError("--capture-video: use --save-model, then ./run.sh evaluate RUN_DIR --capture-video")


def check_devices(args: SebulbaArgs) -> torch.device:
    """``cpu`` or ``cuda``, after checking that this machine has the devices of a group."""
    if args.device.startswith("cuda:"):
        raise bad("device", args.device, "must be auto, cpu or cuda (see --actor-device-ids, --learner-device-ids)")
    device = resolve_device(args)
    if device.type == "cuda":
        for name in ("actor_device_ids", "learner_device_ids"):
            ids = getattr(args, name)
            if max(ids, default=0) >= torch.cuda.device_count():
                raise bad(name, ids, f"this machine has {torch.cuda.device_count()} CUDA device(s), numbered from 0")
    return torch.device(device.type)


def validate_start(args: SebulbaArgs, num_groups: int) -> tuple[torch.device, Layout]:
    """Checks everything that can be checked before anything runs, and fills in ``args.num_envs``.

    Args:
        args: the script's, whose own flags are already validated.
        num_groups: how many groups take part.

    Returns:
        the device type, ``cpu`` or ``cuda``, and the layout.

    Raises:
        UsageError: on the first flag that cannot work.
    """
    validate_runtime(args)
    device = check_devices(args)
    layout = Layout.of(args, num_groups)
    if args.resume is not None and args.num_envs != layout.num_envs:
        there = f"was started with {args.num_envs} environments in all, this start has {layout.num_envs}"
        raise bad("resume", args.resume, f"{there}; start the same number of groups as then")
    args.num_envs = layout.num_envs
    if args.total_timesteps < (batch_size := layout.num_envs * args.num_steps):
        raise bad("total_timesteps", args.total_timesteps, f"is less than one rollout, {batch_size} steps")
    return device, layout


def learner_threads(args: SebulbaArgs, layout: Layout, is_image: bool) -> int:
    """CPU threads of PyTorch in a learner's process.

    By default all cores if nothing else needs them and the work is large: if this is the only process, the lag is 0,
    ``--exact-reduction`` is off, and observations are images or minibatches are large. Acting uses 1.
    """
    # Spinning threads take cores from everything else, and the last bits of a sum depend on their number.
    alone = len(layout.members) == 1 and args.policy_lag == 0 and not args.exact_reduction
    minibatch_size = layout.num_envs * args.num_steps // args.num_minibatches
    if args.num_threads is None and alone:
        return available_cores() if is_image else update_threads(None, minibatch_size)
    return args.num_threads or 1


def pool_threads(args: SebulbaArgs, layout: Layout) -> int:
    """C++ threads of an actor thread's EnvPool: by default an equal share of this machine's cores."""
    # Groups on this machine, according to torchrun or our launcher; SLURM may have given each its own cores already.
    num_groups = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // len(layout.device_ids))
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE", available_cores()))
    num_pools = len(layout.actor_device_ids) * layout.num_actor_threads
    return args.env_threads or max(1, min(available_cores(), cores // num_groups) // num_pools)
