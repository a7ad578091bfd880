"""Starting a run: as the supervisor of local processes, or as one process among those that somebody else started."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from leanrl.sebulba.algorithm import Algorithm
from leanrl.sebulba.args import SebulbaArgs, validate_start
from leanrl.sebulba.collectives import RUN, last_of_all
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.mailbox import Stopped
from leanrl.sebulba.status import Status
from leanrl.sebulba.supervisor import Child, Supervisor
from leanrl.sebulba.worker import Worker
from leanrl.support.cli import report_usage_error, run_directory
from leanrl.support.errors import UsageError, bad
from leanrl.support.run import seed_everything

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
# The ports that SLURM steps meet at, by job and step: below those that Linux gives to outgoing connections.
FIRST_PORT, NUM_PORTS = 20_000, 12_000
# Ports from one step of a job to the next: further than the numbers of jobs that run at the same time, as a rule.
STEP_STRIDE = 1_009


def start(args: SebulbaArgs, script_file: str, algorithm: Algorithm) -> None:
    """Runs a distributed script, whichever way it was started, to its end.

    - Under torchrun (or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), and as a child of the
      supervisor: takes its place as that rank.
    - With ``--distributed``, under SLURM's variables: supervises the processes of this task's group.
    - Otherwise: supervises all processes, on this machine.

    Args:
        args: the script's; its own flags are validated already.
        script_file: ``__file__`` of the script.

    Raises:
        UsageError: a layout that cannot be, or that does not fit the processes that were started.
        SystemExit: something failed, here or in another process.
    """
    as_rank = all(name in os.environ for name in RENDEZVOUS)
    group_size = len(set(args.actor_device_ids) | set(args.learner_device_ids))
    slurm = None if as_rank or not args.distributed else slurm_task(os.environ)
    num_groups = 1 if slurm is None else slurm.num_tasks
    if as_rank and group_size:  # validate_start refuses a group of none
        world_size = int(os.environ["WORLD_SIZE"])
        num_groups, rest = divmod(world_size, group_size)
        if rest or not num_groups:
            needed = f"{world_size} processes were started, but this layout has {group_size} a group"
            raise UsageError(f"--actor-device-ids and --learner-device-ids: {needed}; start a multiple of them")
    device, layout = validate_start(args, num_groups, algorithm.validate)
    if as_rank:
        _run_rank(args, script_file, algorithm, layout, device)
        return
    # What every process would find out, reported once and before any is started.
    seed_everything(args.seed)
    pool = make_pool(args.env_id, range(1), args.seed, args.protocol)
    algorithm.make_agent(pool.single_observation_space, int(pool.single_action_space.n), args)
    pool.close()
    if args.resume is None and args.run_name is not None and (run_directory(args) / "args.json").exists():
        # The leading process would say so, but another group's would wait for it meanwhile.
        run_dir = run_directory(args)
        raise bad("run_name", args.run_name, f"{run_dir} exists; continue it with --resume {run_dir}")
    first_rank = 0 if slurm is None else slurm.number * group_size
    tasks_here = 1 if slurm is None else slurm.tasks_here
    # As torchrun does: those of all groups on this machine.
    environ = {
        **os.environ,
        "WORLD_SIZE": str(len(layout.parts)),
        "LOCAL_WORLD_SIZE": str(tasks_here * group_size),
    }
    if slurm is not None:
        environ |= {"MASTER_ADDR": slurm.host, "MASTER_PORT": str(slurm.port)}
        environ[RUN] = f"{slurm.step}, run {args.run_name or 'without a name'}"
    else:
        store = local_store()
        # PyTorch's own word for a store that no rank holds.
        environ |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    children = [
        Child(
            part.name,
            [sys.executable, str(Path(script_file).resolve()), *sys.argv[1:]],
            {**environ, "RANK": str(part.rank), "LOCAL_RANK": str(part.rank - first_rank)},
        )
        for part in layout.parts[first_rank : first_rank + group_size]
    ]
    code = Supervisor(children, args.start_timeout, args.timeout, partial(last_of_all, layout, environ)).run()
    if code:
        raise SystemExit(code)


def local_store() -> dist.TCPStore:
    """A store that listens on loopback only, as PyTorch's do not by themselves.

    The supervisor holds the port from now on: one that it had only looked up could be taken before it is used.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _run_rank(args, script_file: str, algorithm: Algorithm, layout: Layout, device: torch.device) -> None:
    """Takes the place of rank RANK, to the end of this process; a failure is reported."""
    part = layout.parts[int(os.environ["RANK"])]
    if device.type == "cuda":
        # Groups of one machine, under torchrun, have its devices one after the other.
        local_group = int(os.environ.get("LOCAL_RANK", "0")) // len(layout.device_ids)
        index = local_group * (max(layout.device_ids) + 1) + part.device_id
        if index >= torch.cuda.device_count():
            there = f"group {local_group} of this machine needs CUDA device {index}, there are"
            raise bad("device", args.device, f"{there} {torch.cuda.device_count()}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    status = Status(part.name)
    try:
        Worker(args, script_file, algorithm, layout, part, device, status).run()
    except UsageError as error:
        report_usage_error(error, script_file)
        _end_process(2)
    except Stopped:  # an actor thread has failed, and reported it
        status.wait_until_told()
        _end_process(1)
    except KeyboardInterrupt:  # a second Ctrl-C, or one before signals are noted
        _end_process(130)
    except Exception as error:
        status.fail(error)
        _end_process(1)
    _end_process(0)


def _end_process(code: int) -> NoReturn:
    """Ends this process at once.

    Python's own end would wait for the threads of a broken process group; and those of a whole one, which may still let
    go of a tensor, would find no interpreter any more and abort ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class SlurmTask(NamedTuple):
    """This process's place in a SLURM step."""

    number: int
    """of this task; its group has that number"""
    num_tasks: int
    tasks_here: int
    """on this machine, the most of any of the step"""
    step: str
    """what this run has in common with no other: job, step and hosts"""
    host: str
    """where rank 0 is"""
    port: int


def slurm_task(environ: Mapping[str, str]) -> SlurmTask:
    """Reads SLURM's variables; MASTER_ADDR and MASTER_PORT override the step's first host and its port.

    Raises:
        UsageError: a variable is missing or makes no sense.
    """
    for name in SLURM:
        if name not in environ:
            raise UsageError(
                f"--distributed: {name} is not set; start with srun or torchrun, or leave --distributed out"
            )
    job, step, hosts = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0"), environ["SLURM_STEP_NODELIST"]
    try:
        number, num_tasks = int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS"])
        # "3(x2),1": three on each of the first two machines. Without SLURM all are on this one.
        tasks_here = int(re.match(r"\d*", environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_NTASKS"]))[0])
        by_step = FIRST_PORT + (int(job) + STEP_STRIDE * int(step)) % NUM_PORTS
        port = int(environ.get("MASTER_PORT", by_step))
    except ValueError as error:
        raise UsageError(f"--distributed: SLURM's variables should be numbers ({error})") from None
    if not 0 <= number < num_tasks:
        raise UsageError(f"--distributed: SLURM_PROCID {number} must be from 0 to SLURM_NTASKS - 1 = {num_tasks - 1}")
    host = environ.get("MASTER_ADDR") or first_host(hosts)
    return SlurmTask(number, num_tasks, tasks_here, f"SLURM step {job}.{step} on {hosts}", host, port)


def first_host(nodelist: str) -> str:
    """The first host of a list in SLURM's notation: ``gpu[07-09,12],login`` -> ``gpu07``."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodelist)[0])
