"""A learner: from rollouts to parameters, iteration after iteration, and on one of them the records of the run."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from leanrl.sebulba.algorithm import Update
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.layout import Layout, Part
from leanrl.sebulba.params import ParamsSource
from leanrl.sebulba.pipeline import Pipeline
from leanrl.sebulba.report import Report, Times, checksum, ended_episodes, returns_and_lengths
from leanrl.sebulba.rollout import Rollout
from leanrl.support.devices import synchronize_stream
from leanrl.support.optim import FlatParameters
from leanrl.support.run import Run
from leanrl.support.tracking import cut_metrics

TIMELINE_FILE = "timeline.jsonl"


class Iteration(NamedTuple):
    """What a learner knows of one, once it is over."""

    number: int
    reports: list[Report]
    """of all learners, where this one leads"""
    losses: torch.Tensor
    """in the order of the algorithm's ``loss_names``"""
    stop: bool
    """whether any process was asked to stop"""
    is_last: bool
    """whether the run ends with it: the same for all"""


@dataclass
class Learner:
    """Takes the updates of one process; all learners do the same at the same time."""

    layout: Layout
    part: Part
    pipeline: Pipeline
    """fills ``shards``"""
    shards: Sequence[Rollout]
    """what ``update`` trains on"""
    update: Update
    optimizer: FlatParameters
    collectives: Collectives
    source: ParamsSource | None
    """of the actor threads in this process, if there are any"""
    args: object
    """the script's"""

    def iterate(self, number: int, last: int, stop_requested: Callable[[], bool]) -> Iteration:
        """Trains on rollout ``number`` and passes the new parameters on.

        Args:
            last: number of the last rollout.
            stop_requested: whether this process was asked to stop; called after the update.

        Raises:
            RuntimeError: the learners' parameters differ, or a rollout is not the one that was due.
            Stopped, Stalled, PeerLost: a rollout, or another learner, does not come.
        """
        started = time.time()
        pieces = self.pipeline.exchange(number, stop=False)  # what it was asked is in its sign
        filled = time.time()
        all_reduce = self.collectives.all_reduce_seconds
        self.collectives.begin("update", number)
        losses = self.update.run(number)
        synchronize_stream(self.optimizer.params.device)
        updated = time.time()
        times = Times(started, filled, updated, self.collectives.all_reduce_seconds - all_reduce)
        self.collectives.begin("report of update", number)
        check = number % self.args.checksum_frequency == 0 or number == last
        asked_to_stop = stop_requested() or any(header.stop for _, header in pieces)
        sign = (asked_to_stop, checksum(self.optimizer.params) if check else 0)
        stops, checksums = zip(*self.collectives.gather_signs(sign), strict=True)
        for learner, sum_of_bits in enumerate(checksums):
            if sum_of_bits != checksums[0]:
                names = [self.layout.learner_part(i).name for i in (learner, 0)]
                raise RuntimeError(f"the parameters of {' and '.join(names)} differ after update {number}")
        report = Report(times, pieces, ended_episodes(self.layout, self.part.learner, self.shards))
        reports = self.collectives.gather_reports(report)
        stop = any(stops)
        is_last = number == last or stop
        self.collectives.begin("parameters of update", number)
        self.collectives.send_params(self.optimizer.params, is_last)
        if self.source is not None:
            self.source.publish(number, self.optimizer.params)
        return Iteration(number, reports, losses, stop, is_last)


class Records:
    """What the leading learner writes down of every iteration.

    Args:
        run: the run, entered.
        layout: for the names of the parts.
        optimizer_steps: of an update.
        loss_names: of the losses that ``Update.run`` returns.
        state_dict: the script's state, for checkpoints.
    """

    def __init__(
        self,
        run: Run,
        layout: Layout,
        optimizer_steps: int,
        loss_names: Sequence[str],
        state_dict: Callable[[], dict],
    ) -> None:
        self._run, self._layout, self._optimizer_steps = run, layout, optimizer_steps
        self._loss_names, self._state_dict = loss_names, state_dict
        cut_metrics(run.dir, run.global_step, TIMELINE_FILE)
        self._timeline = open(run.dir / TIMELINE_FILE, "a", buffering=1)

    def close(self) -> None:
        self._timeline.close()

    def add(self, iteration: Iteration, optimizer: FlatParameters) -> None:
        """Counts an iteration; logs and checkpoints where it is time to, and logs the last one always.

        Raises:
            RuntimeError: training has diverged.
        """
        run, args = self._run, self._run.args
        number, reports, losses, _, is_last = iteration
        run.global_step += self._layout.num_envs * args.num_steps
        run.optimizer_steps += self._optimizer_steps
        run.record_episodes(*returns_and_lengths(reports))
        self._timeline.write(json.dumps(self._spans(number, reports)) + "\n")
        checkpoint_due = run.checkpoint_due()
        # Before a checkpoint too: a log point is where a run that has diverged ends.
        if number % args.log_frequency == 0 or is_last or checkpoint_due:
            named = {f"losses/{name}": value for name, value in zip(self._loss_names, losses.tolist(), strict=True)}
            run.log({"charts/learning_rate": optimizer.lr.item(), **named, **stats(number, reports)})
        if checkpoint_due:
            run.checkpoint(self._state_dict())

    def _spans(self, number: int, reports: Sequence[Report]) -> dict:
        """One line of the timeline: for each part, what it did from when to when (time.time())."""
        spans = {}
        for learner, report in enumerate(reports):
            times = report.times
            busy = [["wait for rollouts", times.started, times.filled], ["update", times.filled, times.updated]]
            spans[self._layout.learner_part(learner).name] = busy
            for piece, header in report.pieces:
                started, fetched = header.started, header.started + header.params_wait
                spans[self._layout.thread_name(piece.actor, piece.thread)] = [
                    ["wait for a free buffer", started - header.queue_put, started],
                    ["wait for parameters", started, fetched],
                    ["rollout", fetched, header.ended],
                ]
        return {"global_step": self._run.global_step, "update": number, "spans": spans}


def stats(number: int, reports: Sequence[Report]) -> dict[str, float]:
    """Seconds of the last iteration, means over the parts; and by how many updates its rollouts were behind."""
    headers = [header for report in reports for _, header in report.pieces]
    times = [report.times for report in reports]
    values = {name: [getattr(h, name) for h in headers] for name in ("inference", "env_step", "device_to_host")}
    values |= {
        "rollout": [h.ended - h.started - h.params_wait for h in headers],
        "params_get": [h.params_wait for h in headers],
        "queue_put": [h.queue_put for h in headers],
        "queue_get": [t.filled - t.started for t in times],
        "update": [t.updated - t.filled for t in times],
        "all_reduce": [t.all_reduce for t in times],
    }
    means = {f"stats/{name}_time": float(np.mean(seconds)) for name, seconds in values.items()}
    return {**means, "stats/policy_lag": float(np.mean([number - 1 - h.version for h in headers]))}
