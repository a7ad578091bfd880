"""One process of a run, from set-up to end: actor threads, a learner, or both."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from leanrl.sebulba.actor import ActingAgent, ActorThread, flatten
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.mailbox import Stopped
from leanrl.sebulba.pipeline import Pipeline
from leanrl.sebulba.records import Records, Report, checksum, ended_episodes, returns_and_lengths
from leanrl.sebulba.start import Start
from leanrl.sebulba.status import GRACE_SECONDS, Status
from leanrl.support.cli import report_usage_error
from leanrl.support.devices import synchronize_stream
from leanrl.support.errors import UsageError, bad
from leanrl.support.executables import untouched
from leanrl.support.hub import upload_run
from leanrl.support.run import Run
from leanrl.support.signals import StopRequest

JOIN_SECONDS = 30


class Worker:
    """One process of a run, as the script gets it from ``join`` (which documents the arguments).

    The script calls ``warmup``, starts the threads, iterates over ``rollouts_due`` and calls ``publish`` after each.

    Attributes:
        threads: the actor threads, not started; empty if it does not act.
        shards: what its learner trains on: rollouts by shard number, always the same tensors, but at the same addresses
            only with ``--cudagraphs``; empty if it does not learn.
        sum_over_shards: vectors of one size, one for each of ``shards`` -> their sum over all learners' shards. All
            learners must call it in step. It may overwrite the vectors.

    Raises:
        UsageError: the run directory exists, or other processes were started with other flags.
    """

    def __init__(self, start: Start, script_file: str, agent, optimizer, network, status: Status, stack) -> None:
        self._start, self._args, self._layout, self._member = start, start.args, start.layout, start.member
        self._agent, self._optimizer, self._status, self._stack = agent, optimizer, status, stack
        args, layout, member, batch_size = start.args, start.layout, start.member, start.batch_size
        self._run = None
        if member.learner == 0:
            # Before the rendezvous, so that an existing run directory is refused at once.
            self._run = Run(args, script_file, start.device, start.num_updates * batch_size)
            self._run.model = lambda: {"agent": agent.state_dict(), "network": network}
        self._collectives = Collectives(layout, member, start.device, args)
        self.sum_over_shards = self._collectives.sum_over_shards
        first_step = self._share_start()
        # From here on all processes stop together, whichever of them a signal reaches.
        self._stop = stack.enter_context(StopRequest(quiet=True))
        self._is_last = self._has_enough = False
        self._first = first_step // batch_size
        self.threads = [
            ActorThread(start, i, ActingAgent(agent, args.amp), first_step, status.fail_in_thread)
            for i in range(layout.num_actor_threads if member.actor is not None else 0)
        ]
        served = layout.shards_of(member.learner) if member.learner is not None else ()
        self.shards = {shard: start.allocate(layout.shard_size) for shard in served}
        self._pipeline = Pipeline(start, self.threads, self.shards, self._collectives, self._first)

    def _state_dict(self) -> dict:
        return {"agent": self._agent.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _share_start(self) -> int:
        """Gives every process the lead's state; returns the environment step at which the run starts or resumes."""
        run = self._run
        if run is not None and run.resumed is not None:
            try:
                self._agent.load_state_dict(run.resumed["agent"])
                self._optimizer.load_state_dict(run.resumed["optimizer"])
            except (RuntimeError, KeyError) as error:
                reason = str(error).splitlines()[-1].strip()
                raise bad("resume", self._args.resume, f"its checkpoint does not fit ({reason})") from None
        step = torch.tensor(0 if run is None else run.global_step)
        tensors = [x for x in tree_leaves(self._state_dict()) if isinstance(x, torch.Tensor)]
        self._collectives.broadcast([*tensors, step])
        return step.item()

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """A block for everything that compiles and captures; agent and optimiser are restored after it.

        It ends once every process has reached the end of its own block.
        """
        run, seconds = self._run, self._args.start_timeout
        if run is not None:
            self._stack.enter_context(run)
        with run.warmup(errors_end=True) if run is not None else nullcontext():
            with self._status.warmup_within(seconds), untouched(self._state_dict(), self._start.device):
                yield
            # On a GPU the threads have their own streams, which would not wait for work launched here.
            self._collectives.barrier()
        self._stack.callback(self._stop_threads)
        self._status.tell_under_way()

    def rollouts_due(self) -> Iterator[int]:
        """Waits for each rollout of the run in turn; after the last, leaves the other processes and saves the results.

        A process that only acts sends its rollouts and receives parameters here, and yields nothing.

        Yields:
            the number of a rollout, from 1; ``shards`` hold it until the next one.

        Raises:
            RuntimeError: the learners' parameters differ, a rollout is not the one that was due, or training diverged.
            Stopped, Stalled, PeerLost: a rollout or another process did not come.
        """
        run, learns = self._run, self._member.learner is not None
        if run is not None:
            self._records = Records(run, self._layout, self._state_dict)
            if self._stop.requested:
                run.request_stop()
            run.restore_rng()
            run.start_clock()
        for number in range(self._first + 1, self._start.num_updates + 1):
            self._number, self._started = number, time.time()
            # A learner reports a request to stop with ``publish`` instead.
            self._pieces = self._pipeline.exchange(number, self._stop.requested and not learns)
            if learns:
                self._filled, self._reduced = time.time(), self._collectives.all_reduce_seconds
                self._collectives.note_phase("update", number)
                yield number
            else:
                self._collectives.note_phase("parameters of update", number)
                params, self._is_last = self._collectives.pass_params(flatten(self._agent))
                self._give_params(params)
            if self._is_last:
                break
        self._collectives.finish(self._pipeline.in_flight)  # after an early stop: a rollout nobody needs
        self._collectives.close()  # before what only the lead does: with NCCL all leave together
        if run is not None:
            # After an early stop the threads wait in vain, which would count as a stall if saving took long.
            self._stop_threads()
            summary = run.finish(self._state_dict())
            self._stop.__exit__()  # all is saved, so a signal may end what follows
            if self._args.evaluate_episodes is not None:
                run.evaluate(self._args.evaluate_episodes)
            if self._args.upload_model and not summary["interrupted"]:
                print(f"model: {upload_run(run.dir, self._args.hf_entity)}", flush=True)

    def publish(self, losses, optimizer_steps: int) -> None:
        """Ends the update on the last rollout, and passes the new parameters on.

        Args:
            losses: NamedTuple of 0-d tensors, logged under their names.
            optimizer_steps: taken by the update.
        """
        number, collectives, lr = self._number, self._collectives, self._optimizer.param_groups[0]["lr"]
        synchronize_stream(self._start.device)
        times = self._started, self._filled, time.time(), collectives.all_reduce_seconds - self._reduced
        collectives.note_phase("report of update", number)
        reports = collectives.gather_reports(Report(*times, self._pieces, ended_episodes(self._layout, self.shards)))
        if self._run is not None:
            self._run.record_episodes(*returns_and_lengths(reports))
        params = flatten(self._agent)
        is_last = number == self._start.num_updates
        check = number % self._args.checksum_frequency == 0 or is_last
        asked_to_stop = self._asked_to_stop() or any(header.stop for _, header in self._pieces)
        values = (asked_to_stop, checksum(params) if check else 0)
        stops, checksums = zip(*collectives.gather_ints(values), strict=True)
        for learner, sum_of_bits in enumerate(checksums):
            if sum_of_bits != checksums[0]:
                names = [self._layout.learner(i).name for i in (learner, 0)]
                raise RuntimeError(f"the parameters of {' and '.join(names)} differ after update {number}")
        self._is_last = is_last or any(stops)
        collectives.note_phase("parameters of update", number)
        collectives.pass_params(params, self._is_last)
        self._give_params(params)
        if self._run is not None:
            self._run.optimizer_steps += optimizer_steps
            metrics = {f"losses/{name}": value for name, value in losses._asdict().items()}
            self._records.add(number, reports, {"charts/learning_rate": lr, **metrics}, self._is_last)
            if any(stops) and not self._has_enough:
                self._run.request_stop()  # the signal may have reached only another process

    def _give_params(self, params: torch.Tensor) -> None:
        for thread in self.threads:
            thread.put_params(self._number, params)

    def _asked_to_stop(self) -> bool:
        """Whether a signal reached this process, or it leads a run that has reached its target or its time limit."""
        run, target = self._run, self._args.target_return
        if run is None:
            return self._stop.requested
        stop = run.stop_requested  # read first: if time ran out in between, the run would count as interrupted
        reached = target is not None and run.episodes >= 100 and run.episodic_return >= target
        self._has_enough = reached or run.seconds_left <= 0
        return stop or self._has_enough

    def _stop_threads(self) -> None:
        """Ends the actor threads, at once if they wait; may be called again."""
        for thread in self.threads:
            thread.stop()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def join(start: Start, script_file: str, agent: nn.Module, optimizer, network: dict) -> Iterator[Worker]:
    """Joins the run as the process that ``start`` describes: meets the others and takes over the lead's state.

    At the end of the block the process exits; an error in the block is reported first.

    Args:
        script_file: ``__file__`` of the script.
        agent, optimizer: what is trained; overwritten with the lead's, which may come from a checkpoint.
        network: what the script's ``load_policy`` needs to know about ``agent``, for model.pt.
    """
    status, code = Status(start.member.name), 1
    with ExitStack() as stack:
        try:
            yield Worker(start, script_file, agent, optimizer, network, status, stack)
            code = 0
        except UsageError as error:
            report_usage_error(error, script_file)
            code = 2
        except Stopped:  # an actor thread failed, and reports it
            status.reported.wait(GRACE_SECONDS)
        except KeyboardInterrupt:  # a second Ctrl-C, or one before signals are handled
            code = 130
        except Exception as error:
            # Before the stack unwinds: ending the threads and a broken process group may take a while.
            status.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for the threads of a broken process group. Those of an intact one may still free a tensor
    # after the interpreter is gone, and abort ("terminate called without an active exception").
    os._exit(code)
