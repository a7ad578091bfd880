"""What every learner reports to the others after an update: whether to stop, its times, and the episodes that ended."""

from collections.abc import Sequence
from typing import NamedTuple

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
    """A learner's, read back."""

    stop: bool
    """whether the learner, or an actor that feeds it, was asked to stop"""
    checksum: int
    times: Times
    pieces: list[tuple[Piece, Header]]
    returns: torch.Tensor
    """[T, n] of the episodes that ended with a step of its n environments, NaN elsewhere"""
    lengths: torch.Tensor


def checksum(params: torch.Tensor) -> int:
    """A number that changes with any bit of a float32 vector [P]: equal replicas have equal ones."""
    bits = params.detach().view(torch.int32).long()
    weights = 2 * torch.arange(len(bits), device=bits.device) + 1  # so that exchanged values count too
    return int((bits * weights).sum().item()) % CHECKSUM_RANGE


def write_report(
    stop: bool, sum_of_bits: int, times: Times, headers: Sequence[Header], shards: Sequence[Rollout], num_pieces: int
) -> torch.Tensor:
    """A vector of float64, as long for each learner: ``num_pieces`` is the largest number of pieces that one has."""
    blank = [Header()] * (num_pieces - len(headers))
    numbers = [float(stop), float(sum_of_bits), *times, *(x for header in (*headers, *blank) for x in header)]
    episodes = [torch.cat([getattr(shard, name) for shard in shards], 1) for name in ("returns", "lengths")]
    return torch.cat([torch.tensor(numbers, dtype=torch.float64), torch.stack(episodes).double().flatten().cpu()])


def read_reports(layout: Layout, reports: torch.Tensor, num_steps: int) -> list[Report]:
    """What ``write_report`` wrote, one row a learner."""
    read = []
    for learner, row in enumerate(reports):
        pieces = layout.pieces_of_learner(learner)
        num_envs = layout.shards_per_learner * layout.shard_size
        numbers, episodes = row[: -2 * num_steps * num_envs], row[-2 * num_steps * num_envs :]
        stop, sum_of_bits, *rest = numbers.tolist()
        width, fields = len(Times._fields), len(Header._fields)
        headers = [Header(*rest[i : i + fields]) for i in range(width, width + fields * len(pieces), fields)]
        returns, lengths = episodes.view(2, num_steps, num_envs)
        piece_headers = list(zip(pieces, headers, strict=True))
        read.append(Report(bool(stop), int(sum_of_bits), Times(*rest[:width]), piece_headers, returns, lengths))
    return read


def ended_episodes(reports: Sequence[Report]) -> tuple[list[float], list[float]]:
    """Returns and lengths of the episodes that ended, by step and then environment: the same in every layout."""
    returns, lengths = (torch.cat([getattr(r, name) for r in reports], 1) for name in ("returns", "lengths"))
    ended = ~returns.isnan()
    return returns[ended].tolist(), lengths[ended].tolist()
