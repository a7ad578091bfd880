"""One process of a run, from its set-up to its end: actor threads, a learner, or both."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn as nn

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.algorithm import Algorithm, Shards, Update
from leanrl.sebulba.args import SebulbaArgs, learner_threads, pool_threads
from leanrl.sebulba.collectives import RUN, Collectives
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout, Part
from leanrl.sebulba.learner import Learner, Records
from leanrl.sebulba.mailbox import Stopped
from leanrl.sebulba.params import ParamsSource
from leanrl.sebulba.pipeline import Pipeline
from leanrl.sebulba.rollout import Rollout
from leanrl.sebulba.status import Status
from leanrl.support.cli import RunArgs
from leanrl.support.devices import keep_freed_memory, set_cpu_numerics
from leanrl.support.errors import UsageError
from leanrl.support.executables import untouched
from leanrl.support.hub import upload_run
from leanrl.support.optim import FlatParameters
from leanrl.support.run import Run, seed_everything
from leanrl.support.signals import StopRequest

JOIN_SECONDS = 30


def flags_digest(args: SebulbaArgs) -> int:
    """A number of the run and all flags that each of its processes must have been given alike."""
    own = {field.name for field in dataclasses.fields(RunArgs)}
    shared = {name: value for name, value in dataclasses.asdict(args).items() if name not in own}
    shared[RUN] = os.environ.get(RUN)
    return int(hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:15], 16)


@dataclasses.dataclass
class Worker:
    """One process of a run: actor threads, a learner, or both.

    Raises:
        UsageError: the environment is not there, or not one to learn.
    """

    args: SebulbaArgs
    """the script's, validated"""
    script_file: str
    """``__file__`` of the script"""
    algorithm: Algorithm
    layout: Layout
    part: Part
    """which part of ``layout`` this process is"""
    device: torch.device
    status: Status
    """reports failures of the actor threads"""

    def __post_init__(self) -> None:
        args = self.args
        self._batch_size = self.layout.num_envs * args.num_steps
        self._last = args.total_timesteps // self._batch_size
        with closing(make_pool(args.env_id, range(1), args.seed, args.protocol)) as example:
            self._space, self._num_actions = example.single_observation_space, int(example.single_action_space.n)

    @torch.no_grad()
    def run(self) -> None:
        """Works to the end of the run."""
        args, layout, part, device = self.args, self.layout, self.part, self.device
        seed_everything(args.seed)
        is_image = self._space.dtype == np.uint8
        set_cpu_numerics(learner_threads(args, layout, is_image))
        if is_image and device.type == "cpu":
            keep_freed_memory()
        agent = self._make_agent()
        optimizer = self.algorithm.make_optimizer(agent, args)
        with ExitStack() as stack:
            # Before the rendezvous: a run directory that exists is refused at once.
            total_steps = self._last * self._batch_size
            run = Run(args, self.script_file, device, total_steps) if part.learner == 0 else None
            every = args.checkpoint_every
            if run is not None and every is not None and every < self._batch_size:
                reason = f"less than the {self._batch_size} steps of an update: every update will be saved"
                print(f"warning: --checkpoint-every {every}: {reason}", file=sys.stderr, flush=True)
            collectives = Collectives(layout, part, device, args)
            # Not after an error: NCCL would wait for the others to close their end.
            stack.push(lambda kind, *_: collectives.close() if kind is None else None)
            start = self._share_start(run, agent, optimizer, collectives)
            # From here on all stop together, whichever of them a signal reaches.
            stop = stack.enter_context(StopRequest(quiet=True))

            first = start // self._batch_size
            acts, learns = part.actor is not None, part.learner is not None
            source = ParamsSource(optimizer.params, first, args.policy_lag, args.timeout) if acts else None
            threads = self._make_threads(source, start) if acts else []
            shards = self._make_shards() if learns else []
            pipeline = Pipeline(layout, part, threads, shards, collectives, args.policy_lag, first)
            if run is not None:
                stack.enter_context(run)
            with run.warmup(errors_end=True) if run is not None else nullcontext():
                with self.status.warm_up_within(args.start_timeout):
                    for thread in threads:
                        thread.warm_up()
                    update = self._make_update(agent, optimizer, shards, collectives) if learns else None
                # On a GPU the threads have streams of their own, which would not wait for what was launched here.
                collectives.barrier()
            stop_threads = partial(_stop_threads, threads, source)
            stack.callback(stop_threads)
            # Told first: ending the threads, and a process group that is broken, may take a while.
            stack.push(_reporter(self.status))
            self.status.tell_under_way()
            for thread in threads:
                thread.start()

            numbers = range(first + 1, self._last + 1)
            if not learns:
                for number in numbers:
                    # Rollouts out, parameters in.
                    pipeline.exchange(number, stop.requested)
                    collectives.begin("parameters of update", number)
                    if collectives.receive_params(optimizer.params):
                        break
                    source.publish(number, optimizer.params)
                return
            learner = Learner(layout, part, pipeline, shards, update, optimizer, collectives, source, args)
            if run is None:
                for number in numbers:
                    if learner.iterate(number, self._last, lambda: stop.requested).is_last:
                        break
            else:
                if stop.requested:
                    run.request_stop()
                self._lead(run, learner, agent, optimizer, numbers, stop_threads)

    def _make_agent(self) -> nn.Module:
        return self.algorithm.make_agent(self._space, self._num_actions, self.args).to(self.device)

    def _share_start(
        self, run: Run | None, agent: nn.Module, optimizer: FlatParameters, collectives: Collectives
    ) -> int:
        """Gives every process the parameters and optimiser of the one that has the run; returns the step it is at.

        Raises:
            UsageError: this process was started with other flags than that.
        """
        if run is not None and run.resumed is not None:
            agent.load_state_dict(run.resumed["agent"])
            optimizer.load_state_dict(run.resumed["optimizer"])
        digest = flags_digest(self.args)
        facts = torch.tensor([run.global_step if run is not None else 0, digest])
        collectives.broadcast([*optimizer.tensors(), facts])
        start, digest_of_lead = facts.tolist()
        if digest != digest_of_lead:
            lead = self.layout.learner_part(0)
            raise UsageError(f"{self.part.name} was started with other flags than {lead.name}")
        return start

    def _make_threads(self, source: ParamsSource, start: int) -> list[ActorThread]:
        """The actor threads of this process; the run is taken up at step ``start``."""
        args, layout, actor = self.args, self.layout, self.part.actor
        num_threads = pool_threads(args, layout)
        return [
            ActorThread(
                layout.thread_name(actor, index),
                layout.pieces_of_thread(actor, index),
                make_pool(args.env_id, layout.thread_envs(actor, index), args.seed, args.protocol, num_threads, start),
                self._make_agent(),
                source,
                args,
                self.device,
                start // self._batch_size,
                self._last,
                self.status.fail_in_thread,
            )
            for index in range(layout.num_actor_threads)
        ]

    def _make_shards(self) -> list[Rollout]:
        """What the learner of this process trains on."""
        dtype, shape = torch.from_numpy(self._space.sample()).dtype, self._space.shape
        return [
            Rollout.allocate(self.args.num_steps, self.layout.shard_size, shape, dtype, self.device)
            for _ in self.layout.shards_of(self.part.learner)
        ]

    def _make_update(
        self, agent: nn.Module, optimizer: FlatParameters, rollouts: list[Rollout], collectives: Collectives
    ) -> Update:
        """The algorithm's update, compiled and captured."""
        numbers = self.layout.shards_of(self.part.learner)
        shards = Shards(numbers, rollouts, self.layout.num_shards, collectives.sum_over_shards)
        update = self.algorithm.make_update(agent, optimizer, shards, self.args, self.device)
        with untouched(optimizer.tensors(), self.device):
            update.warm_up()
        return update

    def _lead(
        self,
        run: Run,
        learner: Learner,
        agent: nn.Module,
        optimizer: FlatParameters,
        numbers: range,
        stop_threads: Callable[[], None],
    ) -> None:
        """Takes the updates ``numbers`` and keeps the run directory."""
        args = self.args
        network = {name: getattr(args, name) for name in self.algorithm.network_flags}
        run.model = lambda: {"agent": agent.state_dict(), "network": network}

        def state_dict() -> dict:
            return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

        records = Records(run, self.layout, learner.update.num_steps, self.algorithm.loss_names, state_dict)
        enough = False

        def stop_requested() -> bool:
            nonlocal enough
            stop = run.stop_requested  # before the other: the time may be up between the two
            enough = enough or _enough(run, args)
            return enough or stop

        run.restore_rng()
        run.start_clock()
        try:
            for number in numbers:
                iteration = learner.iterate(number, self._last, stop_requested)
                records.add(iteration, optimizer)
                if iteration.is_last:
                    if iteration.stop and not enough:
                        run.request_stop()  # the signal may have reached another process only
                    break
        finally:
            records.close()
        # After an early stop the threads wait for what never comes: a stall, if saving takes long.
        stop_threads()
        run.finish(state_dict())
        if args.upload_model:
            print(f"model: {upload_run(run.dir, args.hf_entity)}", flush=True)


def _reporter(status: Status) -> Callable:
    """An exit callback that reports an error, but for bad input and an actor thread's, which are reported already."""

    def report(kind, error, traceback) -> None:
        if isinstance(error, Exception) and not isinstance(error, UsageError | Stopped):
            status.fail(error)

    return report


def _stop_threads(threads: list[ActorThread], source: ParamsSource | None) -> None:
    """Ends the actor threads, those that wait at once; may be called again."""
    for thread in threads:
        thread.stop()
    if source is not None:
        source.close()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _enough(run: Run, args) -> bool:
    """Whether the run has reached what it was to reach, before its last step."""
    reached = args.target_return is not None and (run.episodes >= 100 and run.episodic_return >= args.target_return)
    return reached or run.time_is_up
