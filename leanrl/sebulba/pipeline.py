"""Brings rollouts from a group's actor threads to the learners whose shards they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

from leanrl.sebulba.actor import ActorThread
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.layout import Piece
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.sebulba.start import Start


def version_for(rollout: int, policy_lag: int, first_version: int = 0) -> int:
    """The version of the parameters to play a rollout with: the one after ``rollout - 1 - policy_lag`` updates.

    Args:
        rollout: from 1.
        first_version: the version at the start (after a resume, the number of updates before it).
    """
    return max(first_version, rollout - 1 - policy_lag)


@dataclass
class Pipeline:
    """One process's end: sends what its threads play, receives what its shards need."""

    start: Start
    threads: Sequence[ActorThread]
    """this process's actor threads"""
    shards: dict[int, Rollout]
    """what this process's learner trains on, by the shard's number; empty if it does not learn"""
    collectives: Collectives
    first_version: int
    """updates done before the run was resumed, else 0"""

    def __post_init__(self) -> None:
        self.layout, self.member, lag = self.start.layout, self.start.member, self.start.args.policy_lag
        pieces = self.layout.pieces_of_learner(self.member.learner)
        self._received = [(p, self.start.allocate(len(p.envs))) for p in pieces if p.actor != self.member.actor]
        # With a fixed lag, the next rollout is sent during the update, unless a process acts and learns: it is busy.
        # The newest parameters must not wait until the next rollout has been played.
        ahead = lag not in (0, "newest") and all(None in (m.actor, m.learner) for m in self.layout.members)
        self._begun, self._begun_until = self.first_version, self.start.num_updates if ahead else 0
        self.in_flight = []

    def exchange(self, number: int, stop: bool) -> list[tuple[Piece, Header]]:
        """Sends rollout ``number`` and fills the shards with it; the next one may be on its way by then.

        Args:
            stop: whether this process was asked to stop, to tell the learners.

        Returns:
            the pieces that the shards were filled with and their headers, in the order of their environments.

        Raises:
            RuntimeError: a piece is of another rollout, or was played with other parameters than the lag allows.
            Stopped: an actor thread of this process failed.
            Stalled: one did not play in time.
            PeerLost: a process that sends or receives a piece is gone or does not answer in time.
        """
        if self._begun < number:
            if self.threads:
                self.collectives.note_phase("playing rollout", number)
            self._begin(number, stop)
        self.collectives.note_phase("sending rollout", number)
        self.collectives.finish(self.in_flight)
        headers = [(piece, self._fill(number, piece, rollout)) for piece, rollout in self._mine]
        for thread, rollouts in self._played:
            thread.give_back(rollouts)
        if number < self._begun_until:
            self._begin(number + 1, stop)
        return sorted(headers, key=lambda item: item[0].envs.start)

    def _begin(self, number: int, stop: bool) -> None:
        """Waits until the threads have played a rollout, and starts to send and receive it."""
        self._played = [(thread, thread.take()) for thread in self.threads]
        here = [pair for thread, rollouts in self._played for pair in zip(thread.pieces, rollouts, strict=True)]
        for _, rollout in here:
            rollout.header[Header._fields.index("stop")] = float(stop)
        self._mine = [pair for pair in here if pair[0].learner == self.member.learner] + self._received
        others = [pair for pair in here if pair[0].learner != self.member.learner]
        sends = [(self.layout.learner(piece.learner).rank, rollout.buffer) for piece, rollout in others]
        receives = [(self.layout.actor(piece.actor).rank, rollout.buffer) for piece, rollout in self._received]
        self._begun, self.in_flight = number, self.collectives.start(sends, receives)

    def _fill(self, number: int, piece: Piece, rollout: Rollout) -> Header:
        header, lag = Header(*rollout.header.tolist()), self.start.args.policy_lag
        version = header.version if lag == "newest" else version_for(number, lag, self.first_version)
        if (header.rollout, header.version) != (number, version):
            name = self.layout.thread_name(piece.actor, piece.thread)
            came = f"rollout {header.rollout:.0f} of parameters {header.version:.0f}"
            raise RuntimeError(f"{name} delivered {came}, but rollout {number} of parameters {version} was due")
        shard, first = self.shards[piece.shard], self.layout.shard_envs(piece.shard).start
        if len(piece.envs) == self.layout.shard_size and not self.start.args.cudagraphs:
            # Swapping memory takes no time, but captured graphs would keep reading the old addresses.
            for ours, theirs in zip(shard, rollout, strict=True):
                ours.data, theirs.data = theirs.data, ours.data
        else:
            for ours, theirs in zip(shard.columns(), rollout.columns(), strict=True):
                ours[:, piece.envs.start - first : piece.envs.stop - first].copy_(theirs)
        return header
