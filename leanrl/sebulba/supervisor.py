"""The launcher of local processes, itself not a rank: when one of them fails, none is left running."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from leanrl.sebulba.collectives import RUN, last_of_all
from leanrl.sebulba.start import Start
from leanrl.sebulba.status import HEARTBEAT_SECONDS, KINDS, STATUS_FD, UNDER_WAY
from leanrl.support.cli import run_directory
from leanrl.support.errors import bad
from leanrl.support.signals import StopRequest

POLL_SECONDS = 0.1
# After the first failure the others have this long to report theirs: the first one heard may be a mere consequence.
EXPLAIN_SECONDS = 1.0
# A live process writes every HEARTBEAT_SECONDS once its imports are done.
SILENT_SECONDS = 10 * HEARTBEAT_SECONDS
STUCK_SECONDS = 60.0


def supervise(start: Start, script_file: str) -> None:
    """Starts the processes of this task's group, each of which runs the script again, and watches them until they end.

    Args:
        script_file: ``__file__`` of the script.

    Raises:
        UsageError: the run directory exists.
        SystemExit: something failed.
    """
    args, layout, slurm = start.args, start.layout, start.slurm
    if args.resume is None and args.run_name is not None:
        run_dir = run_directory(args)
        if os.path.exists(run_dir / "args.json"):
            # The lead would say so itself, but other groups would keep waiting for it.
            raise bad("run_name", args.run_name, f"{run_dir} exists; continue it with --resume {run_dir}")
    group_size = len(layout.device_ids)
    first_rank = 0 if slurm is None else slurm.number * group_size
    tasks_here = 1 if slurm is None else slurm.tasks_here
    # LOCAL_WORLD_SIZE as in torchrun: the processes of all groups on this machine.
    environ = {**os.environ, "WORLD_SIZE": str(len(layout.members)), "LOCAL_WORLD_SIZE": str(tasks_here * group_size)}
    if slurm is not None:
        environ |= {"MASTER_ADDR": slurm.host, "MASTER_PORT": str(slurm.port)}
        environ[RUN] = f"{slurm.step}, run {args.run_name or 'without a name'}"
    else:
        store = local_store()
        # Tells PyTorch that no rank holds the store.
        environ |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    children = [
        Child(
            member.name,
            [sys.executable, str(Path(script_file).resolve()), *sys.argv[1:]],
            {**environ, "RANK": str(member.rank), "LOCAL_RANK": str(member.rank - first_rank)},
        )
        for member in layout.members[first_rank : first_rank + group_size]
    ]
    code = Supervisor(children, args.start_timeout, args.timeout, lambda: last_of_all(layout, environ)).run()
    if code:
        raise SystemExit(code)


def local_store() -> dist.TCPStore:
    """A store that listens on loopback only, unlike PyTorch's default.

    The supervisor holds the port from now on; a port that it had only looked up could be taken before it is used.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass
class Child:
    """A process to start, and what is known about it since."""

    name: str
    """for messages"""
    command: Sequence[str]
    environ: dict[str, str]
    process: subprocess.Popen | None = None
    pipe: int = -1
    unread: bytes = b""
    last_heard: float = 0.0
    """when it last wrote, or was started; time.monotonic()"""
    under_way: bool = False
    """whether its start-up is over"""
    failures: list[dict] = field(default_factory=list)
    """what it reported, see ``Status.fail``"""

    def start(self) -> None:
        self.pipe, theirs = os.pipe()
        os.set_blocking(self.pipe, False)
        # In its own process group, so that Ctrl-C reaches it only through the supervisor, and never its compilers.
        self.process = subprocess.Popen(
            self.command,
            env={**self.environ, STATUS_FD: str(theirs)},
            pass_fds=[theirs],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(theirs)
        self.last_heard = time.monotonic()

    def read(self) -> bool:
        """Reads what it wrote; False once it has closed its end."""
        try:
            written = os.read(self.pipe, 65536)
        except BlockingIOError:
            return True
        self.last_heard = time.monotonic()
        *lines, self.unread = (self.unread + written).split(b"\n")
        messages = [json.loads(line) for line in lines if line]
        self.under_way |= UNDER_WAY in messages
        self.failures += [line for line in messages if line != UNDER_WAY]
        return bool(written)

    def kill(self) -> None:
        """Kills it and what it started, even if it is suspended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def failed(self) -> bool:
        return bool(self.failures) or self.process.poll() not in (None, 0)


@dataclass
class Supervisor:
    """Watches children until all have succeeded or one has failed."""

    children: Sequence[Child]
    """not started yet"""
    start_timeout: float
    """seconds of silence after which a process counts as stuck during start-up, when imports and compilation may keep
    even a live one silent"""
    timeout: float
    """the same once it is under way; STUCK_SECONDS at most"""
    last_of_all: Callable[[], str] = lambda: ""
    """names the processes that the others waited for, if any"""

    def __post_init__(self) -> None:
        self.timeout = min(self.timeout, STUCK_SECONDS)
        self._signals: list[int] = []

    def run(self) -> int:
        """Starts the children and waits until they end; returns the exit code. Failures are reported on stderr."""
        former = {number: signal.signal(number, self._forward) for number in StopRequest.SIGNALS}
        try:
            with selectors.DefaultSelector() as self._selector:
                for child in self.children:
                    heard = len(self._signals)
                    child.start()
                    for number in self._signals[heard:]:  # signals that came while it started
                        self._pass_on(number, child)
                    self._selector.register(child.pipe, selectors.EVENT_READ, child)
                failed = False
                while self._anyone_left() and not failed:
                    self._listen(POLL_SECONDS)
                    if self._signals.count(signal.SIGINT) > 1:
                        return 130
                    if self._silent_or_failed():
                        self._await_reports()
                        failed = self._silent_or_failed()
                return self._exit_code(failed)
        finally:
            for child in self.children:
                if child.process is not None:
                    child.kill()
                    os.close(child.pipe)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame) -> None:
        self._signals.append(number)
        for child in self.children:
            if child.process is not None and child.process.poll() is None:
                self._pass_on(number, child)

    @staticmethod
    def _pass_on(number: int, child: Child) -> None:
        # SIGINT would make a child that is still importing print a traceback.
        child.process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                self._selector.unregister(key.fileobj)
                time.sleep(POLL_SECONDS)  # it is about to end, and the next poll sees how

    def _silent(self, seconds: float | None = None) -> Child | None:
        """The running child that has been silent longest, if longer than ``seconds`` (by default, its time limit)."""
        now = time.monotonic()

        def is_silent(child: Child) -> bool:
            limit = seconds or (self.timeout if child.under_way else self.start_timeout)
            return child.process.poll() is None and now - child.last_heard > limit

        return min(filter(is_silent, self.children), key=lambda child: child.last_heard, default=None)

    def _await_reports(self) -> None:
        """Reads until all is well again or EXPLAIN_SECONDS are over: others may report the cause of a failure."""
        until = time.monotonic() + EXPLAIN_SECONDS
        while self._silent_or_failed() and time.monotonic() < until and self._anyone_left():
            self._listen(POLL_SECONDS)

    def _exit_code(self, failed: bool) -> int:
        """The exit code; the last line printed names what failed."""
        self._listen(0)
        codes = [child.process.poll() for child in self.children]
        if not failed and not any(codes):
            return 0
        if 2 in codes:  # bad input, which the child reported in one line
            return 2
        reported = any(child.failures for child in self.children)
        ended = {-number for number in StopRequest.SIGNALS}
        if self._signals and not reported and ended & {*codes} and {*codes} <= {None, 0, *ended}:
            return 128 + self._signals[0]  # asked to stop during start-up
        print(self._explain(), file=sys.stderr, flush=True)
        return 1

    def _anyone_left(self) -> bool:
        return any(child.process.poll() is None for child in self.children)

    def _silent_or_failed(self) -> bool:
        return self._silent() is not None or any(child.failed for child in self.children)

    def _explain(self) -> str:
        """One line about the failure that caused the others."""
        killed = {child.name: -child.process.poll() for child in self.children if (child.process.poll() or 0) < 0}
        for name, number in killed.items():
            if number == signal.SIGKILL:
                return f"{name} killed by signal {number}"
        failures = [failure for child in self.children for failure in child.failures]
        failures.sort(key=lambda failure: KINDS.index(failure["kind"]))
        if failures and failures[0]["kind"] == "error":
            return failures[0]["message"]
        for name, number in killed.items():  # a library may abort after another process's error or stall
            last = self.last_of_all()
            return f"{name} killed by signal {number}{last and f'; {last}'}"
        # A silent process; if others report failures, a shorter silence counts.
        if (silent := self._silent(min(SILENT_SECONDS, self.timeout) if failures else None)) is not None:
            seconds = time.monotonic() - silent.last_heard
            start = "" if silent.under_way else " at start-up; see --start-timeout"
            waiting = f"; {failures[0]['message']}" if failures else ""
            return f"{silent.name} has not answered for {seconds:.0f} s{start}{waiting}"
        if failures:
            return failures[0]["message"]
        child = next((child for child in self.children if child.failed), None)
        if child is None:  # a silent one has answered since
            return "a process did not answer in time"
        return f"{child.name} ended with exit code {child.process.poll()}"
