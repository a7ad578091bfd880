"""What a process tells its supervisor: that it is alive, and what went wrong."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from leanrl.sebulba.mailbox import Stalled

STATUS_FD = "LEANRL_STATUS_FD"
HEARTBEAT_SECONDS = 0.5
# After an actor thread's error, which is reported at once, its process has this long to end.
GRACE_SECONDS = 5
# In printable characters, of at most 4 bytes each in JSON: a pipe writes up to 4,096 bytes atomically, so that no
# heartbeat lands within a line.
LONGEST_REASON = 900
UNDER_WAY = {"kind": "under way"}
# Kinds of failures, causes before consequences.
KINDS = ("error", "stall", "lost")


class PeerLost(Exception):
    """Another process is gone; the message says which, and what was expected of it."""


class Status:
    """Writes to the supervisor's pipe, if there is one (torchrun supervises in its own way)."""

    def __init__(self, process_name: str) -> None:
        self._process_name = process_name
        fd = os.environ.pop(STATUS_FD, None)
        self._fd = None if fd is None else int(fd)
        self._failed = threading.Lock()
        self.reported = threading.Event()
        """set by ``fail`` when it is done"""
        if self._fd is not None:
            os.set_inheritable(self._fd, False)  # or compilers started here would keep it open
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._write(b"\n")
            time.sleep(HEARTBEAT_SECONDS)

    def _write(self, line: bytes) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, line)
            except OSError:  # the supervisor is gone, and nobody else would end this process
                os._exit(1)

    @contextmanager
    def warmup_within(self, seconds: float) -> Iterator[None]:
        """Fails and ends the process if the block takes longer; its peers could only tell that they are waiting."""
        late = Stalled(f"its warm-up takes longer than --start-timeout {seconds:g} s")
        limit = threading.Timer(seconds, self.fail_in_thread, (late, self._process_name))
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def tell_under_way(self) -> None:
        """Ends the start-up: from now on, the supervisor takes a shorter silence for a failure."""
        self._write(json.dumps(UNDER_WAY).encode() + b"\n")

    def fail(self, error: BaseException, who: str | None = None) -> None:
        """Reports this process's first failure, on stderr and to the supervisor.

        Args:
            who: the thread that failed, if it was not the process itself.
        """
        if not self._failed.acquire(blocking=False):
            return
        kind = "lost" if isinstance(error, PeerLost) else "stall" if isinstance(error, Stalled) else "error"
        reason = str(error) if kind != "error" else f"{type(error).__name__}: {error}" if str(error) else repr(error)
        # One line, without control characters, which take 6 bytes, or lone surrogates, which cannot be encoded.
        reason = " ".join("".join(char if char.isprintable() else " " for char in reason).split())
        message = f"{who or self._process_name}: {reason[:LONGEST_REASON]}"
        if kind == "error":
            traceback.print_exception(error)
        self._write(json.dumps({"kind": kind, "message": message}, ensure_ascii=False).encode() + b"\n")
        if self._fd is None:  # else the supervisor prints it, once it has heard all failures
            print(message, file=sys.stderr, flush=True)
        self.reported.set()

    def fail_in_thread(self, error: BaseException, who: str) -> None:
        """``fail`` from a daemon thread; ends the process if its main thread, perhaps waiting for a peer, does not."""
        # On a thread of its own, because this one must end: the main thread waits for it as it closes the run.
        grace = threading.Timer(GRACE_SECONDS, os._exit, (1,))
        grace.daemon = True
        grace.start()
        self.fail(error, who)
