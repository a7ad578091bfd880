"""What every learner reports to the one that leads after an update: its times, and the episodes that ended."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from leanrl.sebulba.layout import Layout, Piece
from leanrl.sebulba.rollout import Header, Rollout

# Sums of bits are kept below this, so that float64 holds them.
CHECKSUM_RANGE = 2**52


class Times(NamedTuple):
    """Of one iteration of a learner; ``started`` and the like are what time.time() read, the rest are seconds."""

    started: float = 0
    """when it began to wait for rollouts"""
    filled: float = 0
    """when its shards were full"""
    updated: float = 0
    all_reduce: float = 0


class Report(NamedTuple):
    """A learner's."""

    times: Times
    pieces: list[tuple[Piece, Header]]
    """what it learned from"""
    episodes: np.ndarray
    """[3, E] of those that ended there, see ``ended_episodes``"""


def checksum(params: torch.Tensor) -> int:
    """A number that changes with any bit of a float32 vector [P]: equal replicas have equal ones."""
    bits = params.detach().view(torch.int32).long()
    weights = 2 * torch.arange(len(bits), device=bits.device) + 1  # so that exchanged values count too
    return int((bits * weights).sum().item()) % CHECKSUM_RANGE


def ended_episodes(layout: Layout, learner: int, shards: Sequence[Rollout]) -> np.ndarray:
    """Episodes that ended in a learner's shards: [3, E], place (by step, then environment of all), return, length."""
    returns, lengths = (torch.cat([getattr(shard, name) for shard in shards], 1) for name in ("returns", "lengths"))
    steps, envs = (~returns.isnan()).nonzero(as_tuple=True)
    places = steps * layout.num_envs + layout.shard_envs(layout.shards_of(learner).start).start + envs
    return torch.stack([places.double(), returns[steps, envs], lengths[steps, envs]]).cpu().numpy()


def returns_and_lengths(reports: Sequence[Report]) -> tuple[list[float], list[float]]:
    """Of the episodes that ended, by step and then environment: the same in every layout."""
    episodes = np.concatenate([report.episodes for report in reports], 1)
    _, returns, lengths = episodes[:, episodes[0].argsort()].tolist()
    return returns, lengths
