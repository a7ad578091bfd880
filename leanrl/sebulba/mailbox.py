"""Waiting for things between threads, with time limits, until the run ends."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The run ends; whoever waits goes home."""


class Stalled(Exception):
    """Something that was waited for did not come in time; the message says who waited for whom."""


class Closable:
    """What threads of one process wait at.

    Args:
        timeout: seconds after which a wait is a stall.
    """

    def __init__(self, timeout: float) -> None:
        self._changed = threading.Condition()
        self._timeout = timeout
        self._closed = False

    def _wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Waits, ``_changed`` held, until ``condition()`` is true; ``what`` says who waits for whom.

        Raises:
            Stopped: this is closed.
            Stalled: the condition did not come true in time.
        """
        if not self._changed.wait_for(lambda: condition() or self._closed, self._timeout):
            raise Stalled(f"waited {self._timeout:g} s for {what}")
        if self._closed:
            raise Stopped

    def close(self) -> None:
        """Ends every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Mailbox(Closable, Generic[T]):
    """First in, first out. Putting never blocks: the number of buffers that go round bounds it."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, what: str) -> T:
        """The oldest item.

        Args:
            what: who waits for whom, for the message of a stall.

        Raises:
            Stopped: the mailbox is closed.
            Stalled: nothing came in time.
        """
        with self._changed:
            self._wait_for(lambda: self._items, what)
            return self._items.popleft()
