"""How this process was started: which process of the layout it is, on which device."""

import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch

from leanrl.sebulba.args import SebulbaArgs, learner_threads, validate_start
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout, Member
from leanrl.sebulba.rollout import Rollout
from leanrl.support.devices import keep_freed_memory, set_cpu_numerics
from leanrl.support.errors import UsageError, bad
from leanrl.support.run import seed_everything

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The port of a SLURM step is derived from job and step, and is below Linux's range of ephemeral ports.
FIRST_PORT, NUM_PORTS = 20_000, 12_000
# Distance between the ports of a job's steps: usually more than that between the ids of jobs that run together.
STEP_STRIDE = 1_009


class SlurmTask(NamedTuple):
    """This process's place in a SLURM step."""

    number: int
    """of this task, and of its group"""
    num_tasks: int
    tasks_here: int
    """tasks per machine; the first machine's, if they differ"""
    step: str
    """what identifies the run: job, step and hosts"""
    host: str
    """where rank 0 runs"""
    port: int


@dataclass(frozen=True)
class Start:
    """A process's arguments, layout and device, and its place among the others."""

    args: SebulbaArgs
    layout: Layout
    member: Member | None
    """this process; None if it is to start and watch the others"""
    device: torch.device
    """this process's own"""
    space: gym.spaces.Box
    """of observations"""
    action_space: gym.spaces.Discrete | gym.spaces.Box
    slurm: SlurmTask | None = None
    """if ``--distributed`` asks for it"""

    @property
    def batch_size(self) -> int:
        """Environment steps per update."""
        return self.layout.num_envs * self.args.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of the whole run, each on one rollout of every environment."""
        return self.args.total_timesteps // self.batch_size

    def allocate(self, num_envs: int) -> Rollout:
        """Memory for a rollout of ``num_envs`` environments."""
        return Rollout.allocate(self.space, self.action_space, self.args.num_steps, num_envs, self.device)


def resolve_start(args: SebulbaArgs) -> Start:
    """Finds out how this process was started, seeds it, and inspects the environment; starts nothing.

    - Under torchrun (or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), and as a child of the
      supervisor, it is that rank.
    - With ``--distributed`` under SLURM, it supervises the processes of this task's group.
    - Otherwise it supervises all processes, on this machine.

    Args:
        args: the script's, whose own flags are already validated. ``num_envs`` is filled in.

    Raises:
        UsageError: an impossible layout, or one that does not fit the processes that were started; an environment or
            device that does not exist.
    """
    as_rank = all(name in os.environ for name in RENDEZVOUS)
    group_size = len(set(args.actor_device_ids) | set(args.learner_device_ids))
    slurm = None if as_rank or not args.distributed else slurm_task(os.environ)
    num_groups = 1 if slurm is None else slurm.num_tasks
    if as_rank and group_size:  # validate_start refuses an empty group
        world_size = int(os.environ["WORLD_SIZE"])
        num_groups, rest = divmod(world_size, group_size)
        if rest or not num_groups:
            needed = f"{world_size} processes were started, but this layout needs {group_size} per group"
            raise UsageError(f"--actor-device-ids and --learner-device-ids: {needed}; start a multiple of {group_size}")
    device, layout = validate_start(args, num_groups)
    seed_everything(args.seed)
    with closing(make_pool(args.env_id, range(1), args.seed, args.protocol, args.env_backend, num_threads=1)) as pool:
        space, action_space = pool.single_observation_space, pool.single_action_space
    if not as_rank:
        return Start(args, layout, None, device, space, action_space, slurm)
    member = layout.members[int(os.environ["RANK"])]
    if device.type == "cuda":
        # Under torchrun, the groups on a machine take consecutive ranges of its devices.
        local_group = int(os.environ.get("LOCAL_RANK", "0")) // len(layout.device_ids)
        index = local_group * (max(layout.device_ids) + 1) + member.device_id
        if index >= torch.cuda.device_count():
            raise bad("device", args.device, f"group {local_group} of this machine needs CUDA device {index}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    is_image = space.dtype == np.uint8
    set_cpu_numerics(learner_threads(args, layout, is_image))
    if is_image and device.type == "cpu":
        keep_freed_memory()
    return Start(args, layout, member, device, space, action_space)


def slurm_task(environ: Mapping[str, str]) -> SlurmTask:
    """Reads SLURM's variables; MASTER_ADDR and MASTER_PORT override the step's first host and its port.

    Raises:
        UsageError: a variable is missing or makes no sense.
    """
    try:
        job, step, hosts = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0"), environ["SLURM_STEP_NODELIST"]
        number, num_tasks = int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS"])
        # "3(x2),1": three on each of the first two machines. If it is not set, all are on this one.
        tasks_here = int(re.match(r"\d*", environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_NTASKS"]))[0])
        by_step = FIRST_PORT + (int(job) + STEP_STRIDE * int(step)) % NUM_PORTS
        port = int(environ.get("MASTER_PORT", by_step))
    except KeyError as error:
        reason = "is not set; start with srun or torchrun, or with --no-distributed"
        raise UsageError(f"--distributed: {error.args[0]} {reason}") from None
    except ValueError as error:
        raise UsageError(f"--distributed: SLURM's variables should be numbers ({error})") from None
    if not 0 <= number < num_tasks:
        raise UsageError(f"--distributed: SLURM_PROCID {number} must be from 0 to SLURM_NTASKS - 1 = {num_tasks - 1}")
    host = environ.get("MASTER_ADDR") or first_host(hosts)
    return SlurmTask(number, num_tasks, tasks_here, f"SLURM step {job}.{step} on {hosts}", host, port)


def first_host(nodelist: str) -> str:
    """The first host of a list in SLURM's notation: ``gpu[07-09,12],login`` -> ``gpu07``."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodelist)[0])
