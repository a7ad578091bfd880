"""What learners report about an update, and what the lead learner records."""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from leanrl.sebulba.layout import Layout, Piece
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.support.run import Run
from leanrl.support.tracking import cut_metrics

TIMELINE_FILE = "timeline.jsonl"


class Report(NamedTuple):
    """A learner's report on one update; ``started``, ``filled`` and ``updated`` are readings of time.time()."""

    started: float
    """when it started to wait for rollouts"""
    filled: float
    """when its shards were full"""
    updated: float
    all_reduce: float
    """seconds spent in sums over shards"""
    pieces: list[tuple[Piece, Header]]
    """what it trained on"""
    episodes: np.ndarray
    """[3, E], those that ended in its shards; see ``ended_episodes``"""


def checksum(params: torch.Tensor) -> int:
    """A number that changes with any bit of a vector [P] of floats; equal for equal replicas."""
    bits = params.detach().view(torch.int32).long()
    weights = 2 * torch.arange(len(bits), device=bits.device) + 1  # so that swapped values change it too
    return (bits * weights).sum().item()


def ended_episodes(layout: Layout, shards: dict[int, Rollout]) -> np.ndarray:
    """Episodes that ended in a learner's shards, [3, E]: place (by step, then global environment), return, length."""
    returns, lengths = (torch.cat([getattr(x, name) for x in shards.values()], 1) for name in ("returns", "lengths"))
    steps, envs = (~returns.isnan()).nonzero(as_tuple=True)
    places = steps * layout.num_envs + layout.shard_envs(min(shards)).start + envs
    return torch.stack([places.double(), returns[steps, envs], lengths[steps, envs]]).cpu().numpy()


def returns_and_lengths(reports: Sequence[Report]) -> tuple[list[float], list[float]]:
    """Returns and lengths of the episodes that ended, by step and then environment: the same in every layout."""
    episodes = np.concatenate([report.episodes for report in reports], 1)
    _, returns, lengths = episodes[:, episodes[0].argsort()].tolist()
    return returns, lengths


class Records:
    """What the lead learner records of every update.

    Args:
        run: the run, already entered.
        layout: for the names of processes and threads.
        state_dict: the script's state, for checkpoints.
    """

    def __init__(self, run: Run, layout: Layout, state_dict: Callable[[], dict]) -> None:
        self._run, self._layout, self._state_dict, self._lags = run, layout, state_dict, []
        cut_metrics(run.dir, run.global_step, TIMELINE_FILE)

    def add(self, number: int, reports: Sequence[Report], metrics: dict[str, torch.Tensor], is_last: bool) -> None:
        """Counts update ``number``, and logs and checkpoints when due; the last update is always logged.

        Raises:
            RuntimeError: training has diverged.
        """
        run, args = self._run, self._run.args
        run.global_step += self._layout.num_envs * args.num_steps
        with open(run.dir / TIMELINE_FILE, "a") as timeline:
            timeline.write(json.dumps(self._spans(number, reports)) + "\n")
        self._lags += [number - 1 - header.version for report in reports for _, header in report.pieces]
        checkpoint_due = run.checkpoint_due()
        # Before a checkpoint too, because logging is what stops a run that has diverged.
        if number % args.log_frequency == 0 or is_last or checkpoint_due:
            lags = {"stats/policy_lag": float(np.mean(self._lags)), "stats/policy_lag_max": max(self._lags)}
            run.log({**{name: value.item() for name, value in metrics.items()}, **stats(reports), **lags})
            self._lags.clear()
        if checkpoint_due:
            run.checkpoint(self._state_dict())

    def _spans(self, number: int, reports: Sequence[Report]) -> dict:
        """One line of the timeline: what each learner and actor thread did, from when to when (time.time())."""
        spans = {}
        for learner, report in enumerate(reports):
            busy = [["wait for rollouts", report.started, report.filled], ["update", report.filled, report.updated]]
            spans[self._layout.learner(learner).name] = busy
            for piece, header in report.pieces:
                started, fetched = header.started, header.started + header.params_wait
                spans[self._layout.thread_name(piece.actor, piece.thread)] = [
                    ["wait for a free buffer", started - header.queue_put, started],
                    ["wait for parameters", started, fetched],
                    ["rollout", fetched, header.ended],
                ]
        return {"global_step": self._run.global_step, "update": number, "spans": spans}


def stats(reports: Sequence[Report]) -> dict[str, float]:
    """Mean seconds of each phase of an iteration."""
    headers = [header for report in reports for _, header in report.pieces]
    values = {name: [getattr(h, name) for h in headers] for name in ("inference", "env_step", "device_to_host")}
    values |= {
        "rollout": [h.ended - h.started - h.params_wait for h in headers],
        "params_get": [h.params_wait for h in headers],
        "queue_put": [h.queue_put for h in headers],
        "queue_get": [report.filled - report.started for report in reports],
        "update": [report.updated - report.filled for report in reports],
        "all_reduce": [report.all_reduce for report in reports],
    }
    return {f"stats/{name}_time": float(np.mean(seconds)) for name, seconds in values.items()}
