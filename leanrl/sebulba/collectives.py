"""What processes send each other: gloo on CPUs, NCCL on GPUs, always from the main thread and in the same order.

Each iteration: rollouts from actors to learners, one sum of gradients per optimiser step, a few numbers from every
learner to all, a report to the one that leads, and the new parameters to the actors that have no learner beside them.
"""

import datetime
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from leanrl.sebulba.layout import Layout, Part
from leanrl.sebulba.records import Report
from leanrl.sebulba.status import PeerLost
from leanrl.support.errors import UsageError
from leanrl.support.run import synchronize

# Names the run to all its processes, and to those of no other; torchrun sets it, too.
RUN = "TORCHELASTIC_RUN_ID"
# How far a process has come with a rollout.
PHASES = ("playing rollout", "sending rollout", "update", "report of update", "parameters of update")
# A supervisor waits so long for what they have noted.
STORE_SECONDS = 5
# Characters of a backend's error: the part that was waited for must fit on the line, too.
LONGEST_ERROR = 600

Messages = Sequence[tuple[int, torch.Tensor]]
"""(rank, what is sent there or received from there)"""


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Turns the backend's errors into PeerLost: they mean that a peer is gone or did not come in time.

    Allocate outside of it: running out of memory is a RuntimeError, too.
    """
    try:
        yield
    except RuntimeError as error:
        # Without the place in gloo's source, which the message begins with. NCCL's reason is on its later lines.
        reason = " ".join(re.sub(r"\[\S*:\d+\] ", "", str(error)).split()) or type(error).__name__
        raise PeerLost(f"lost {what} ({reason[:LONGEST_ERROR]})") from error


class Collectives:
    """The process groups of one process.

    Args:
        layout, part: who is there, and which of them this is.
        device: where messages are.
        args: the script's. ``start_timeout`` limits waits for a peer up to the end of ``barrier``, ``timeout`` those
            after it; ``exact_reduction`` sums in the order of the shards, the same in every layout, and costs the
            memory of one gradient per shard.

    Raises:
        PeerLost: a process does not come; every method that waits for one raises it too, where that is gone or late.
    """

    def __init__(self, layout: Layout, part: Part, device: torch.device, args) -> None:
        self._layout, self._part, self._device = layout, part, device
        self._exact = args.exact_reduction
        self._in_time = f"within --start-timeout {args.start_timeout:g} s"
        self.all_reduce_seconds = 0.0
        """spent summing gradients, ever (on a GPU: launching the sums)"""
        # Within a group, one learner sends the new parameters to the processes that only act.
        self._sends_params = layout.learner_part(part.group * len(layout.learner_device_ids)).rank
        self._receive_params = [p.rank for p in layout.parts if p.group == part.group and p.learner is None]
        self._learners = self._store = None
        if len(layout.parts) == 1:
            return
        self._store = _rendezvous(part.rank, len(layout.parts), args.start_timeout)
        with waiting_for(f"another process, which did not set its connections up {self._in_time}"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=part.rank,
                world_size=len(layout.parts),
                timeout=datetime.timedelta(seconds=args.start_timeout),
                device_id=device if device.type == "cuda" else None,
            )
            # That group is for the start. Every process makes every group, in the same order.
            limit = datetime.timedelta(seconds=args.timeout)
            self._everyone = learners = dist.new_group(timeout=limit)
            learner_ranks = [p.rank for p in layout.parts if p.learner is not None]
            if 1 < len(learner_ranks) < len(layout.parts):
                learners = dist.new_group(learner_ranks, timeout=limit)
            if part.learner is not None and len(learner_ranks) > 1:
                self._learners = learners

    def close(self) -> None:
        if self._store is not None:
            dist.destroy_process_group()

    def begin(self, phase: str, number: int) -> None:
        """Notes, for ``last_of_all``, that this process has come to one of PHASES of rollout ``number``."""
        with suppress(RuntimeError):  # where the store is gone, what comes next says so
            if self._store is not None:
                self._store.set(f"phase {self._part.rank}", f"{number} {PHASES.index(phase)}")

    def barrier(self) -> None:
        """Ends the start: waits until every process has come here and this one's device has done all it was given."""
        if self._store is not None:
            message = torch.zeros(1, device=self._device)
            with waiting_for(f"another process, which did not get ready {self._in_time}"):
                dist.all_reduce(message)
        # NCCL only makes the device wait.
        synchronize(self._device)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrites ``tensors`` with those of learner 0, which leads; in the start."""
        if self._store is not None:
            lead = self._layout.learner_part(0)
            for tensor in tensors:
                message = tensor.detach().to(self._device).contiguous()
                with waiting_for(f"{lead.name}, which did not send its state {self._in_time}"):
                    dist.broadcast(message, lead.rank)
                tensor.detach().copy_(message)

    def start(self, sends: Messages, receives: Messages, what: str = "a rollout") -> list[tuple[dist.Work, str]]:
        """Begins to send and receive, between two ranks in the same order on both; returns what ``finish`` takes."""
        operations = [dist.P2POp(dist.isend, message, rank, self._everyone) for rank, message in sends]
        operations += [dist.P2POp(dist.irecv, message, rank, self._everyone) for rank, message in receives]
        if not operations:
            return []
        names = [f"{self._layout.parts[operation.peer].name}, {what}" for operation in operations]
        with waiting_for(" or ".join(dict.fromkeys(names))):
            works = dist.batch_isend_irecv(operations)
        # NCCL gives one handle for all.
        return list(zip(works, names, strict=False))

    def finish(self, begun: list[tuple[dist.Work, str]]) -> None:
        """Waits until what was begun has come, and empties the list; on a GPU only the current stream waits."""
        for work, name in begun:
            with waiting_for(name):
                work.wait()
        begun.clear()

    def sum_over_shards(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of one vector a shard over all learners' shards; this learner's own are ``vectors``, in order.

        A vector may be overwritten.
        """
        if self._learners is None:
            return sum_in_order(vectors)
        start = time.perf_counter()
        peers = waiting_for("another learner, in a sum of gradients")
        if self._exact:
            mine = torch.stack(list(vectors))
            everyone = [torch.empty_like(mine) for _ in range(self._layout.num_learners)]
            with peers:
                dist.all_gather(everyone, mine, group=self._learners)
            total = sum_in_order([vector for shards in everyone for vector in shards])
        else:
            total = sum_in_order(vectors)  # of one vector that vector itself, which nobody reads again
            with peers:
                dist.all_reduce(total, group=self._learners)
        self.all_reduce_seconds += time.perf_counter() - start
        return total

    def gather_signs(self, sign: Sequence[int]) -> list[Sequence[int]]:
        """Every learner's few whole numbers, for all learners."""
        if self._learners is None:
            return [sign]
        message = torch.tensor(sign, dtype=torch.int64, device=self._device)
        signs = [torch.empty_like(message) for _ in range(self._layout.num_learners)]
        with waiting_for("another learner, after its update"):
            dist.all_gather(signs, message, group=self._learners)
        return torch.stack(signs).tolist()

    def gather_reports(self, report: Report) -> list[Report]:
        """Every learner's report, for the one that leads; nothing for the others."""
        if self._learners is None:
            return [report]
        reports = [None] * self._layout.num_learners if self._part.learner == 0 else None
        with waiting_for("another learner, its report"):
            dist.gather_object(report, reports, self._layout.learner_part(0).rank, group=self._learners)
        return reports or []

    def pass_params(self, params: torch.Tensor, is_last: bool = False) -> tuple[torch.Tensor, bool]:
        """From a group's first learner to its processes that only act: new parameters, and whether the run ends.

        Args:
            params: [P]; of a process that receives, only the size counts.
            is_last: whether this was the last update; likewise.

        Returns:
            what was sent, or received; what was given where nothing was.
        """
        if not self._receive_params:
            return params, is_last
        message, rank = torch.cat([params, params.new_tensor([float(is_last)])]), self._part.rank
        sends = [(to, message) for to in self._receive_params] if rank == self._sends_params else []
        receives = [(self._sends_params, message)] if rank in self._receive_params else []
        self.finish(self.start(sends, receives, "the new parameters"))
        return message[:-1], message[-1].item() > 0


def _rendezvous(rank: int, world_size: int, seconds: float) -> dist.Store:
    """Where the processes of this run find each other: at the supervisor, at torchrun's agent, or at rank 0.

    Raises:
        UsageError: another run has taken the port, or this rank.
    """
    host, port, ours = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ.get(RUN, "")
    limit = datetime.timedelta(seconds=seconds)
    late = f"did not all come to {host}:{port} within --start-timeout {seconds:g} s; a group that has failed says why"
    taken = f"MASTER_PORT {port}: another run meets at {host}"
    with waiting_for(f"the other processes, which {late}"):
        try:
            store, *_ = next(rendezvous("env://", rank, world_size, timeout=limit))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                raise UsageError(f"{taken}, or another program listens there; set a port that is free") from None
            raise
        if rank == 0:
            store.set("leanrl run", ours)
        theirs = store.get("leanrl run").decode()
    if theirs != ours:
        raise UsageError(f"{taken}: {theirs}, while this process is of {ours}; set one for each")
    store = _own_part(store, os.environ)
    if store.add(f"rank {rank}", 1) > 1:
        raise UsageError(f"{taken} that calls itself {ours}, too, and has a rank {rank}; set one for each")
    return store


def _own_part(store: dist.Store, environ: Mapping[str, str]) -> dist.Store:
    """What belongs to this start of the run that ``environ`` tells of."""
    # torchrun's agent may keep its store over a restart, and with it the addresses of the processes before.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{environ.get(RUN, '')}, attempt {attempt}", store)


def last_of_all(layout: Layout, environ: Mapping[str, str]) -> str:
    """Names the processes that have come least far; "" where none is behind, or nobody knows.

    Args:
        environ: of a process of the run.
    """
    came = {}
    with suppress(RuntimeError):  # the store is gone with the process that held it
        limit = datetime.timedelta(seconds=STORE_SECONDS)
        store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=limit)
        notes = _own_part(store, environ)
        for part in layout.parts:
            if notes.check([key := f"phase {part.rank}"]):
                came[part.name] = [*map(int, notes.get(key).split())]
    least = min(came.values(), default=None)
    names = [name for name, progress in came.items() if progress == least]
    if len(names) == len(came):
        return ""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return f"{' and '.join(names[:3] + more)} had only come to {PHASES[least[1]]} {least[0]}"


def sum_in_order(vectors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum, added up from the first to the last; they may be computed one by one on the way."""
    return reduce(torch.add, vectors)
