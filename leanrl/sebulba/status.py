"""A process's line to its supervisor: that it lives, and what went wrong."""

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
# An actor thread's error is reported at once; the process that it stops with it has this long to come to its end.
GRACE_SECONDS = 5
# Printable characters, of 4 bytes at most in JSON: a line of a pipe's 4,096 bytes at most is written whole, with no
# heartbeat inside.
LONGEST_REASON = 900
UNDER_WAY = {"kind": "under way"}
# Of failures, those first that others follow from.
KINDS = ("error", "stall", "lost")


class PeerLost(Exception):
    """Another process broke off; the message says who, and what was wanted of it."""


class Status:
    """Writes to the pipe that the supervisor reads, if there is one (torchrun is a supervisor of its own)."""

    def __init__(self, part_name: str) -> None:
        self._part_name = part_name
        fd = os.environ.pop(STATUS_FD, None)
        self._fd = None if fd is None else int(fd)
        self._failed = threading.Lock()
        self.told = threading.Event()
        """set by ``fail``, at its end"""
        if self._fd is not None:
            os.set_inheritable(self._fd, False)  # compilers that this process starts would keep it open
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._write(b"\n")
            time.sleep(HEARTBEAT_SECONDS)

    def _write(self, line: bytes) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, line)
            except OSError:  # the supervisor is gone, and nobody would end this process any more
                os._exit(1)

    @contextmanager
    def warm_up_within(self, seconds: float) -> Iterator[None]:
        """Fails, and ends the process, where the block takes longer: peers would only know that they wait."""
        late = Stalled(f"its warm-up takes longer than --start-timeout {seconds:g} s")
        limit = threading.Timer(seconds, self.fail_in_thread, (late, self._part_name))
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def tell_under_way(self) -> None:
        """Ends the start: from now on the supervisor takes a shorter silence for a failure."""
        self._write(json.dumps(UNDER_WAY).encode() + b"\n")

    def fail(self, error: BaseException, who: str | None = None) -> None:
        """Tells the first failure of this process: on stderr, and to the supervisor.

        Args:
            who: the part, where it is not the process itself.
        """
        if not self._failed.acquire(blocking=False):
            return
        kind = "lost" if isinstance(error, PeerLost) else "stall" if isinstance(error, Stalled) else "error"
        reason = str(error) if kind != "error" else f"{type(error).__name__}: {error}" if str(error) else repr(error)
        # One line; a control character would take 6 bytes, and half of a surrogate pair cannot be written at all.
        reason = " ".join("".join(char if char.isprintable() else " " for char in reason).split())
        message = f"{who or self._part_name}: {reason[:LONGEST_REASON]}"
        if kind == "error":
            traceback.print_exception(error)
        self._write(json.dumps({"kind": kind, "message": message}, ensure_ascii=False).encode() + b"\n")
        if self._fd is None:  # else the supervisor says it, once all have been heard
            print(message, file=sys.stderr, flush=True)
        self.told.set()

    def fail_in_thread(self, error: BaseException, who: str) -> None:
        """``fail`` from a daemon thread; ends the process if its main thread, waiting for a peer say, does not."""
        # On a thread of its own: the main thread, which is to close the run, waits for the end of the one that failed.
        grace = threading.Timer(GRACE_SECONDS, os._exit, (1,))
        grace.daemon = True
        grace.start()
        self.fail(error, who)
