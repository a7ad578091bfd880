"""Brings every rollout of a group's actor threads to the learners whose shards they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.layout import Layout, Part, Piece
from leanrl.sebulba.params import version_for
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.support.devices import synchronize_stream


@dataclass
class Pipeline:
    """One process's end: what its threads play goes out, what its shards need comes in."""

    layout: Layout
    part: Part
    threads: Sequence[ActorThread]
    """of this process"""
    shards: Sequence[Rollout]
    """of this process's learner, in order, to be filled; empty where none learns"""
    collectives: Collectives
    policy_lag: int
    """which version of the parameters must have produced a rollout"""
    first_version: int
    """updates taken before the run (resumed) began"""

    def __post_init__(self) -> None:
        pieces = self.layout.pieces_of_learner(self.part.learner) if self.part.learner is not None else []
        self._wanted = [piece for piece in pieces if piece.actor != self.part.actor]
        self._received = [self._allocate(piece) for piece in self._wanted]

    def _allocate(self, piece: Piece) -> Rollout:
        shard = self.shards[0]
        num_steps, shape, dtype = len(shard.actions), tuple(shard.obs.shape[2:]), shard.obs.dtype
        return Rollout.allocate(num_steps, len(piece.envs), shape, dtype, shard.obs.device)

    def exchange(self, number: int, stop: bool) -> list[tuple[Piece, Header]]:
        """Passes rollout ``number`` on, and fills the shards with it.

        Args:
            stop: whether this process was asked to stop, which the learners are to hear.

        Returns:
            the pieces that they were filled with, in the order of their environments, each with its header.

        Raises:
            RuntimeError: a piece is of another rollout, or was played with other parameters than the lag allows.
            Stopped: an actor thread of this process has failed.
            Stalled: one did not play in time.
            PeerLost: a process that a piece comes from, or goes to, is gone or does not answer in time.
        """
        if self.threads:
            self.collectives.begin("playing rollout", number)
        played = [thread.take(self.part.name) for thread in self.threads]
        self.collectives.begin("sending rollout", number)
        here = [
            (piece, rollout)
            for thread, rollouts in zip(self.threads, played, strict=True)
            for piece, rollout in zip(thread.pieces, rollouts, strict=True)
        ]
        for _, rollout in here:
            rollout.header[Header._fields.index("stop")] = float(stop)
        sends = [
            (self.layout.learner_part(piece.learner).rank, rollout.buffer)
            for piece, rollout in here
            if piece.learner != self.part.learner
        ]
        receives = [
            (self.layout.actor_part(piece.actor).rank, rollout.buffer)
            for piece, rollout in zip(self._wanted, self._received, strict=True)
        ]
        self.collectives.exchange(sends, receives)
        mine = [(piece, rollout) for piece, rollout in here if piece.learner == self.part.learner]
        mine += zip(self._wanted, self._received, strict=True)
        headers = [(piece, self._fill(number, piece, rollout)) for piece, rollout in mine]
        if here:  # the threads overwrite their buffers next, on streams of their own
            synchronize_stream(here[0][1].buffer.device)
        for thread, rollouts in zip(self.threads, played, strict=True):
            thread.give_back(rollouts)
        return sorted(headers, key=lambda item: item[0].envs.start)

    def _fill(self, number: int, piece: Piece, rollout: Rollout) -> Header:
        header = rollout.read_header()
        version = version_for(number, self.policy_lag, self.first_version)
        if (header.rollout, header.version) != (number, version):
            name = self.layout.thread_name(piece.actor, piece.thread)
            came = f"rollout {header.rollout:.0f} of parameters {header.version:.0f}"
            raise RuntimeError(f"{name} delivered {came}, but rollout {number} of parameters {version} was due")
        shard = self.shards[piece.shard % self.layout.shards_per_learner]
        first = self.layout.shard_envs(piece.shard).start
        for target, source in zip(shard.columns(), rollout.columns(), strict=True):
            target[:, piece.envs.start - first : piece.envs.stop - first].copy_(source)
        return header
