"""One process of a run, from its set-up to its end: actor threads, a learner, or both."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import numpy as np
import torch

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.algorithm import Algorithm, Shards
from leanrl.sebulba.args import SebulbaArgs, learner_threads
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout, Part
from leanrl.sebulba.learner import Learner, Records
from leanrl.sebulba.mailbox import Stopped
from leanrl.sebulba.params import ParamsSource
from leanrl.sebulba.pipeline import Pipeline
from leanrl.sebulba.rollout import Rollout
from leanrl.sebulba.status import Status
from leanrl.support.cli import RunArgs
from leanrl.support.devices import available_cores, keep_freed_memory, set_cpu_numerics
from leanrl.support.errors import UsageError
from leanrl.support.executables import untouched
from leanrl.support.hub import upload_run
from leanrl.support.run import Run, seed_everything
from leanrl.support.signals import StopRequest

JOIN_SECONDS = 30


def flags_digest(args: SebulbaArgs) -> int:
    """A number of all flags that every process of a run must have been given alike."""
    own = {field.name for field in dataclasses.fields(RunArgs)}
    shared = {name: value for name, value in dataclasses.asdict(args).items() if name not in own}
    return int(hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:15], 16)


@torch.no_grad()
def work(
    args: SebulbaArgs,
    script_file: str,
    algorithm: Algorithm,
    layout: Layout,
    part: Part,
    device: torch.device,
    status: Status,
) -> None:
    """Runs one process to the end of the run.

    Args:
        args: the script's, validated.
        script_file: ``__file__`` of the script.
        layout, part: who is there, and which of them this is.
        device: of this process.
        status: tells failures of the actor threads.
    """
    batch_size = layout.num_envs * args.num_steps
    last = args.total_timesteps // batch_size
    seed_everything(args.seed)
    with ExitStack() as stack:
        lead = part.learner == 0
        example = make_pool(args.env_id, range(1), args.seed, args.protocol)
        space, num_actions = example.single_observation_space, int(example.single_action_space.n)
        example.close()
        set_cpu_numerics(learner_threads(args, layout, is_image=space.dtype == np.uint8))
        keep_freed_memory()
        agent = algorithm.make_agent(space, num_actions, args).to(device)
        optimizer = algorithm.make_optimizer(agent, args)

        # Before the rendezvous: a run directory that exists is refused at once.
        run = Run(args, script_file, device, total_steps=last * batch_size) if lead else None
        collectives = Collectives(layout, part, device, args.timeout, args.exact_reduction)
        stack.callback(collectives.close)
        if lead and run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])
        facts = torch.tensor([run.global_step if lead else 0, flags_digest(args)])
        collectives.broadcast([*optimizer.tensors(), facts])
        start, digest_of_lead = facts.tolist()
        if digest_of_lead != flags_digest(args):
            raise UsageError(f"{part.name} was started with other flags than {layout.learner_part(0).name}")
        # From here on all stop together, whichever of them a signal reaches.
        stop = stack.enter_context(StopRequest(quiet=True))
        first = start // batch_size

        # Threads of environments are shared by the actor threads of this machine, as far as it is known.
        num_pools = len(layout.actor_device_ids) * layout.num_actor_threads
        env_threads = args.env_threads or max(1, available_cores() // num_pools)
        source, threads = None, []
        if part.actor is not None:
            source = ParamsSource(optimizer.params, first, args.policy_lag, args.timeout)
            for index in range(layout.num_actor_threads):
                envs = layout.thread_envs(part.actor, index)
                threads.append(
                    ActorThread(
                        layout.thread_name(part.actor, index),
                        layout.pieces_of_thread(part.actor, index),
                        make_pool(args.env_id, envs, args.seed, args.protocol, env_threads, start),
                        algorithm.make_agent(space, num_actions, args).to(device),
                        source,
                        args,
                        device,
                        first,
                        last,
                        status.fail_in_thread,
                    )
                )
        shards = []
        if part.learner is not None:
            dtype, shape = torch.from_numpy(space.sample()).dtype, space.shape
            shards = [
                Rollout.allocate(args.num_steps, layout.shard_size, shape, dtype, device)
                for _ in layout.shards_of(part.learner)
            ]
        pipeline = Pipeline(layout, part, threads, shards, collectives, args.policy_lag, first)

        if lead:
            stack.enter_context(run)
        with run.warmup(errors_end=True) if lead else nullcontext():
            for thread in threads:
                thread.warm_up()
            if part.learner is not None:
                numbers = layout.shards_of(part.learner)
                update = algorithm.make_update(
                    agent,
                    optimizer,
                    Shards(numbers, shards, layout.num_shards, collectives.sum_over_shards),
                    args,
                    device,
                )
                with untouched(optimizer.tensors(), device):
                    update.warm_up()
            # On a GPU the threads have streams of their own, which would not wait for what was launched on this one.
            collectives.barrier()
        stack.callback(_stop_threads, threads, source)
        # Told first: ending the threads, and a process group that is broken, may take a while.
        stack.push(_teller(status))
        for thread in threads:
            thread.start()

        if part.learner is None:
            # Rollouts out, parameters in.
            for number in range(first + 1, last + 1):
                pipeline.exchange(number, stop.requested)
                if collectives.receive_params(optimizer.params):
                    break
                source.publish(number, optimizer.params)
            return
        learner = Learner(layout, part, pipeline, shards, update, optimizer, collectives, source, args)
        if lead:
            if stop.requested:
                run.request_stop()
            _lead(run, args, algorithm, layout, agent, optimizer, update, learner, first, last)
        else:
            for number in range(first + 1, last + 1):
                if learner.iterate(number, last, lambda: stop.requested).is_last:
                    break


def _teller(status: Status) -> Callable:
    """An exit callback that tells an error, unless it is bad input or an actor thread's, which that has told."""

    def tell(kind, error, traceback) -> None:
        if isinstance(error, Exception) and not isinstance(error, UsageError | Stopped):
            status.fail(error)

    return tell


def _stop_threads(threads: list[ActorThread], source: ParamsSource | None) -> None:
    """Ends the actor threads, those that wait at once."""
    for thread in threads:
        thread.stop()
    if source is not None:
        source.close()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _lead(run: Run, args, algorithm, layout, agent, optimizer, update, learner, first: int, last: int) -> None:
    """The main thread of the learner that owns the run directory."""

    def state_dict() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    records = Records(run, layout, algorithm.loss_names, state_dict)
    enough = False

    def stop_requested() -> bool:
        nonlocal enough
        enough = enough or _enough(run, args)
        return enough or run.stop_requested

    run.restore_rng()
    run.start_clock()
    try:
        for number in range(first + 1, last + 1):
            iteration = learner.iterate(number, last, stop_requested)
            run.optimizer_steps += update.num_steps
            records.add(iteration, optimizer)
            if iteration.is_last:
                if any(report.stop for report in iteration.reports) and not enough:
                    run.request_stop()  # the signal may have reached another process only
                break
    finally:
        records.close()
    run.finish(state_dict())
    if args.save_model or args.upload_model:
        network = {name: getattr(args, name) for name in algorithm.network_flags}
        run.save_model({"agent": agent.state_dict(), "network": network})
        if args.upload_model:
            print(f"model: {upload_run(run.dir, args.hf_entity)}", flush=True)


def _enough(run: Run, args) -> bool:
    """Whether the run has reached what it was to reach, before its last step."""
    reached = args.target_return is not None and (run.episodes >= 100 and run.episodic_return >= args.target_return)
    return reached or (args.max_seconds is not None and run.wall_seconds >= args.max_seconds)
