"""Who runs where with which environments: ``a0-l1,2-d1`` as processes, ranks, shards and pieces."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from leanrl.support.errors import UsageError, bad, require_at_least


class Member(NamedTuple):
    """One process: everything that runs on one device of one group."""

    rank: int
    group: int
    device_id: int
    actor: int | None
    """number of its actor device among those of all groups, by rank; None if it has no actor threads"""
    learner: int | None
    """number of its learner among those of all groups, by rank; None if it has none"""

    @property
    def name(self) -> str:
        """Its name in error messages: ``learner 1 (rank 2)``."""
        roles = [f"actor {self.actor}"] if self.actor is not None else []
        roles += [f"learner {self.learner}"] if self.learner is not None else []
        return f"{' and '.join(roles)} (rank {self.rank})"


class Piece(NamedTuple):
    """The environments of one shard that one actor thread plays: the unit in which rollouts are sent."""

    actor: int
    thread: int
    learner: int
    shard: int
    envs: range
    """global indices of its environments"""


def parse_layout(text: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """``a0-l1,2-d1`` -> actor device ids, learner device ids, number of groups. UsageError for anything else."""
    match = re.fullmatch(r"a(\d+(?:,\d+)*)-l(\d+(?:,\d+)*)-d([1-9]\d*)", text)
    if not match:
        raise UsageError(f"{text}: not a layout; write actor devices, learner devices and groups as in a0-l1,2-d1")
    actors, learners = (tuple(map(int, ids.split(","))) for ids in match.groups()[:2])
    return actors, learners, int(match[3])


class Layout:
    """The processes of a run and the fixed partition of its environments.

    Environments are numbered by group, actor device, thread and place within the thread, in this order. A shard is a
    block of consecutive environments, and a learner serves consecutive shards of its own group, so that shard s holds
    the same environments in every layout with the same numbers of environments and shards.

    Args:
        actor_device_ids, learner_device_ids: of one group; a device in both acts and learns in one process.
        num_groups: copies of the group (``d2``: 2).
        num_actor_threads: per actor device.
        local_num_envs: per actor thread.
        num_shards: None for one per learner.

    Raises:
        UsageError: device ids that are negative or repeated, or counts that do not divide evenly.
    """

    def __init__(
        self,
        actor_device_ids: Sequence[int],
        learner_device_ids: Sequence[int],
        num_groups: int = 1,
        num_actor_threads: int = 1,
        local_num_envs: int = 1,
        num_shards: int | None = None,
    ) -> None:
        for name, ids in (("actor_device_ids", actor_device_ids), ("learner_device_ids", learner_device_ids)):
            if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
                raise bad(name, ids, "needs at least one device id, none negative and none repeated")
        self.actor_device_ids, self.learner_device_ids = tuple(actor_device_ids), tuple(learner_device_ids)
        self.num_groups = num_groups
        self.num_actor_threads = num_actor_threads
        self.local_num_envs = local_num_envs
        self.num_actors = num_groups * len(actor_device_ids)
        self.num_learners = num_groups * len(learner_device_ids)
        self.num_envs = self.num_actors * num_actor_threads * local_num_envs
        self.num_shards = self.num_learners if num_shards is None else num_shards
        if self.num_shards < 1 or self.num_shards % self.num_learners:
            raise bad("num_shards", self.num_shards, f"must be a multiple of the {self.num_learners} learners")
        if self.num_envs % self.num_shards and num_shards is not None:
            raise bad("num_shards", num_shards, f"must divide the {self.num_envs} environments of all actor threads")
        if self.num_envs % self.num_shards:
            what = f"gives {self.num_envs} environments in all, which {self.num_shards} learners cannot share evenly"
            step = self.num_shards // math.gcd(self.num_shards, self.num_envs // local_num_envs)
            raise bad("local_num_envs", local_num_envs, f"{what}; use a multiple of {step}")
        self.shard_size = self.num_envs // self.num_shards
        self.shards_per_learner = self.num_shards // self.num_learners
        # Actor devices first: rank 0 acts, and if it also learns it is the first learner.
        self.device_ids = tuple(dict.fromkeys((*actor_device_ids, *learner_device_ids)))
        self.members = tuple(self._member(rank) for rank in range(num_groups * len(self.device_ids)))

    def _member(self, rank: int) -> Member:
        group, local = divmod(rank, len(self.device_ids))
        device_id = self.device_ids[local]

        def number(ids: tuple[int, ...]) -> int | None:
            # By rank, whatever the order in the flag, because collectives gather in the order of ranks.
            by_rank = [device for device in self.device_ids if device in ids]
            return group * len(ids) + by_rank.index(device_id) if device_id in ids else None

        return Member(rank, group, device_id, number(self.actor_device_ids), number(self.learner_device_ids))

    def actor(self, actor: int) -> Member:
        """The process of an actor device."""
        return next(member for member in self.members if member.actor == actor)

    def learner(self, learner: int) -> Member:
        """The process of a learner. That of learner 0 is the lead: it owns the run directory."""
        return next(member for member in self.members if member.learner == learner)

    def thread_name(self, actor: int, thread: int) -> str:
        """An actor thread's name in error messages: ``actor thread 3 (rank 0)``, counted over all actors."""
        return f"actor thread {actor * self.num_actor_threads + thread} (rank {self.actor(actor).rank})"

    def thread_envs(self, actor: int, thread: int) -> range:
        """Global indices of the environments of an actor thread."""
        first = (actor * self.num_actor_threads + thread) * self.local_num_envs
        return range(first, first + self.local_num_envs)

    def shard_envs(self, shard: int) -> range:
        """Global indices of the environments of a shard."""
        return range(shard * self.shard_size, (shard + 1) * self.shard_size)

    def shards_of(self, learner: int) -> range:
        """The shards that a learner serves."""
        return range(learner * self.shards_per_learner, (learner + 1) * self.shards_per_learner)

    def pieces_of_thread(self, actor: int, thread: int) -> list[Piece]:
        """What an actor thread plays, in the order of its environments."""
        envs = self.thread_envs(actor, thread)
        pieces = []
        for shard in range(envs.start // self.shard_size, (envs.stop - 1) // self.shard_size + 1):
            whole = self.shard_envs(shard)
            part = range(max(envs.start, whole.start), min(envs.stop, whole.stop))
            pieces.append(Piece(actor, thread, shard // self.shards_per_learner, shard, part))
        return pieces

    def pieces_of_learner(self, learner: int) -> list[Piece]:
        """What a learner trains on, in the order of the environments."""
        threads = itertools.product(range(self.num_actors), range(self.num_actor_threads))
        return [piece for thread in threads for piece in self.pieces_of_thread(*thread) if piece.learner == learner]

    @classmethod
    def of(cls, args, num_groups: int = 1) -> "Layout":
        """The layout that a script's arguments ask for; UsageError if it is impossible."""
        require_at_least(args, 1, "local_num_envs", "num_actor_threads", "num_shards")
        ids = args.actor_device_ids, args.learner_device_ids
        layout = cls(*ids, num_groups, args.num_actor_threads, args.local_num_envs, args.num_shards)
        if args.exact_reduction and args.local_num_envs % layout.shard_size:
            needed = layout.num_envs // math.gcd(args.local_num_envs, layout.shard_size)
            problem = f"is not a whole number of shards of {layout.shard_size} environments, as --exact-reduction needs"
            raise bad("local_num_envs", args.local_num_envs, f"{problem}; use --num-shards {needed}")
        return layout
