"""Communication between processes: gloo on CPUs, NCCL on GPUs, always from the main thread and in the same order.

In each iteration: rollouts from actors to learners, one gradient sum per optimiser step, reports to the lead learner,
a few numbers from every learner to all, and the new parameters to processes that only act.
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

from leanrl.sebulba.args import SebulbaArgs, flags_digest
from leanrl.sebulba.layout import Layout, Member
from leanrl.sebulba.records import Report
from leanrl.sebulba.status import PeerLost
from leanrl.support.devices import synchronize_stream
from leanrl.support.errors import UsageError

# Environment variable that tells this run from others that might meet at the same port; torchrun sets it too.
RUN = "TORCHELASTIC_RUN_ID"
# How far a process has got with a rollout.
PHASES = ("playing rollout", "sending rollout", "update", "report of update", "parameters of update")
# How long a supervisor waits for the store in which processes note their phase.
STORE_SECONDS = 5
# Longest part of a backend's error that is quoted, in characters, so that the line has room for the peer's name.
LONGEST_ERROR = 600

Messages = Sequence[tuple[int, torch.Tensor]]
"""(rank, tensor to send to it or to receive from it)"""


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Turns the backend's errors into PeerLost: a peer is gone or did not arrive in time.

    Allocate outside the block: running out of memory is a RuntimeError too.
    """
    try:
        yield
    except RuntimeError as error:
        # Without gloo's source location, which starts its message. NCCL gives the reason on later lines.
        reason = " ".join(re.sub(r"\[\S*:\d+\] ", "", str(error)).split()) or type(error).__name__
        raise PeerLost(f"lost {what} ({reason[:LONGEST_ERROR]})") from error


class Collectives:
    """One process's connections to all others.

    Args:
        layout, member: all processes, and which of them this is.
        device: where messages are.
        args: the script's. ``start_timeout`` limits waits for a peer until the end of ``barrier``, ``timeout`` those
            after it. ``exact_reduction`` sums in shard order, the same in every layout, at the cost of one gradient's
            memory per shard.

    Raises:
        PeerLost: a process does not arrive. Methods that wait for one raise it too, if that one is gone or late.
    """

    def __init__(self, layout: Layout, member: Member, device: torch.device, args: SebulbaArgs) -> None:
        self._layout, self._member, self._device = layout, member, device
        self._exact = args.exact_reduction
        self._in_time = f"within --start-timeout {args.start_timeout:g} s"
        self.all_reduce_seconds = 0.0
        """total time spent on sums over shards (on a GPU: on launching them)"""
        # Within a group, one learner sends the new parameters to the processes that only act.
        self._params_source = layout.learner(member.group * len(layout.learner_device_ids)).rank
        self._params_receivers = [p.rank for p in layout.members if p.group == member.group and p.learner is None]
        self._learners = self._store = None
        if len(layout.members) == 1:
            return
        self._store = _rendezvous(member.rank, len(layout.members), args)
        with waiting_for(f"another process, which did not set its connections up {self._in_time}"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=member.rank,
                world_size=len(layout.members),
                timeout=datetime.timedelta(seconds=args.start_timeout),
                device_id=device if device.type == "cuda" else None,
            )
            # The default process group is for the start-up. Every process must create every group, in the same order.
            limit = datetime.timedelta(seconds=args.timeout)
            self._everyone = learners = dist.new_group(timeout=limit)
            learner_ranks = [p.rank for p in layout.members if p.learner is not None]
            if 1 < len(learner_ranks) < len(layout.members):
                learners = dist.new_group(learner_ranks, timeout=limit)
            if member.learner is not None and len(learner_ranks) > 1:
                self._learners = learners

    def close(self) -> None:
        if self._store is not None:
            dist.destroy_process_group()

    def note_phase(self, phase: str, number: int) -> None:
        """Notes, for ``last_of_all``, that this process has reached one of PHASES of rollout ``number``."""
        with suppress(RuntimeError):  # if the store is gone, the next operation says so
            if self._store is not None:
                self._store.set(f"phase {self._member.rank}", f"{number} {PHASES.index(phase)}")

    def barrier(self) -> None:
        """Ends the start-up: waits until every process is here and this one's device has finished its work."""
        if self._store is not None:
            message = torch.zeros(1, device=self._device)
            with waiting_for(f"another process, which did not get ready {self._in_time}"):
                dist.all_reduce(message)
        # With NCCL, only the device has waited so far.
        synchronize_stream(self._device)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrites ``tensors`` with those of learner 0, the lead; for the start-up."""
        if self._store is not None:
            lead = self._layout.learner(0)
            for tensor in tensors:
                message = tensor.detach().to(self._device).contiguous()
                with waiting_for(f"{lead.name}, which did not send its state {self._in_time}"):
                    dist.broadcast(message, lead.rank)
                tensor.detach().copy_(message)

    def start(self, sends: Messages, receives: Messages, what: str = "a rollout") -> list[tuple[dist.Work, str]]:
        """Starts to send and receive, in the same order on both ranks of a pair; returns what ``finish`` takes."""
        operations = [dist.P2POp(dist.isend, message, rank, self._everyone) for rank, message in sends]
        operations += [dist.P2POp(dist.irecv, message, rank, self._everyone) for rank, message in receives]
        if not operations:
            return []
        names = [f"{self._layout.members[operation.peer].name}, while passing {what}" for operation in operations]
        with waiting_for(" or ".join(dict.fromkeys(names))):
            works = dist.batch_isend_irecv(operations)
        # NCCL returns one handle for all.
        return list(zip(works, names, strict=False))

    def finish(self, begun: list[tuple[dist.Work, str]]) -> None:
        """Waits for what ``start`` began, and empties the list; on a GPU only the current stream waits."""
        for work, name in begun:
            with waiting_for(name):
                work.wait()
        begun.clear()

    def sum_over_shards(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of one vector per shard over all learners' shards; ``vectors`` are this learner's, in order.

        May overwrite them.
        """
        if self._learners is None:
            return sum_in_order(vectors)
        start = time.perf_counter()
        peers = waiting_for("another learner, while summing over shards")
        if self._exact:
            mine = torch.stack(list(vectors))
            everyone = [torch.empty_like(mine) for _ in range(self._layout.num_learners)]
            with peers:
                dist.all_gather(everyone, mine, group=self._learners)
            total = sum_in_order([vector for shards in everyone for vector in shards])
        else:
            total = sum_in_order(vectors)  # a single vector is overwritten: nobody reads it again
            with peers:
                dist.all_reduce(total, group=self._learners)
        self.all_reduce_seconds += time.perf_counter() - start
        return total

    def gather_ints(self, values: Sequence[int]) -> list[Sequence[int]]:
        """All learners' ``values``, a few integers each (stop request, checksum), on every learner."""
        if self._learners is None:
            return [values]
        message = torch.tensor(values, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(message) for _ in range(self._layout.num_learners)]
        with waiting_for("another learner, while gathering stop requests and checksums"):
            dist.all_gather(gathered, message, group=self._learners)
        return torch.stack(gathered).tolist()

    def gather_reports(self, report: Report) -> list[Report]:
        """Every learner's report on the lead; an empty list on the others."""
        if self._learners is None:
            return [report]
        reports = [None] * self._layout.num_learners if self._member.learner == 0 else None
        with waiting_for("another learner, while gathering its report"):
            dist.gather_object(report, reports, self._layout.learner(0).rank, group=self._learners)
        return reports or []

    def pass_params(self, params: torch.Tensor, is_last: bool = False) -> tuple[torch.Tensor, bool]:
        """Sends new parameters, and whether the run ends, from a group's first learner to its processes that only act.

        Args:
            params: [P]; in a process that receives, only the size matters.
            is_last: whether this was the last update; ignored in a process that receives.

        Returns:
            what was sent or received, or the arguments if neither.
        """
        if not self._params_receivers:
            return params, is_last
        message, rank = torch.cat([params, params.new_tensor([float(is_last)])]), self._member.rank
        sends = [(to, message) for to in self._params_receivers] if rank == self._params_source else []
        receives = [(self._params_source, message)] if rank in self._params_receivers else []
        self.finish(self.start(sends, receives, "the new parameters"))
        return message[:-1], message[-1].item() > 0


def _rendezvous(rank: int, world_size: int, args: SebulbaArgs) -> dist.Store:
    """The store where the run's processes meet: at the supervisor, torchrun's agent, or rank 0.

    Raises:
        UsageError: another run or program has this port, a process has other flags, or two have the same rank.
    """
    host, port, seconds = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], args.start_timeout
    ours = f"{os.environ.get(RUN, 'a run')} with flags {flags_digest(args)}"
    limit = datetime.timedelta(seconds=seconds)
    late = f"did not all come to {host}:{port} within --start-timeout {seconds:g} s; a group that has failed says why"
    taken = f"MASTER_PORT {port}: another run meets at {host}"
    with waiting_for(f"the other processes, which {late}"):
        try:
            store, *_ = next(rendezvous("env://", rank, world_size, timeout=limit))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                raise UsageError(f"{taken}, or another program listens there; choose a free port") from None
            raise
        if rank == 0:
            store.set("leanrl run", ours)
        theirs = store.get("leanrl run").decode()
    if theirs != ours:
        reason = f"{theirs} (a hash of them), while this process is of {ours}"
        raise UsageError(f"{taken}: {reason}; give each run its own port, and all processes of a run the same flags")
    store = _own_part(store, os.environ)
    if store.add(f"rank {rank}", 1) > 1:
        raise UsageError(f"{taken}, also calls itself {ours} and has a rank {rank}; give each run its own port")
    return store


def _own_part(store: dist.Store, environ: Mapping[str, str]) -> dist.Store:
    """The keys of ``store`` that belong to this attempt of the run in ``environ``."""
    # torchrun's agent may keep its store across restarts, with the addresses of the previous processes.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{environ.get(RUN, '')}, attempt {attempt}", store)


def last_of_all(layout: Layout, environ: Mapping[str, str]) -> str:
    """Names the processes that are furthest behind; "" if none is, or nobody knows.

    Args:
        environ: environment variables of one of the run's processes.
    """
    reached = {}
    with suppress(RuntimeError):  # the store is gone, with the process that held it
        limit = datetime.timedelta(seconds=STORE_SECONDS)
        store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=limit)
        notes = _own_part(store, environ)
        for member in layout.members:
            if notes.check([key := f"phase {member.rank}"]):
                reached[member.name] = [*map(int, notes.get(key).split())]
    least = min(reached.values(), default=None)
    names = [name for name, progress in reached.items() if progress == least]
    if len(names) == len(reached):
        return ""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return f"{' and '.join(names[:3] + more)} had only reached {PHASES[least[1]]} {least[0]}"


def sum_in_order(vectors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum, added from first to last; ``vectors`` may be generated one by one."""
    return reduce(torch.add, vectors)
