"""Waiting for things between threads, with time limits, until the run ends."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The run ends; whoever waits goes home."""


class Stalled(Exception):
    """Something that was waited for did not come in time; the message says who waited for whom."""


class Mailbox(Generic[T]):
    """First in, first out. Putting never blocks: the number of things that go round bounds it.

    Args:
        timeout: seconds after which a wait is a stall.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._closed = False

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
            if not self._changed.wait_for(lambda: self._items or self._closed, self._timeout):
                raise Stalled(f"waited {self._timeout:g} s for {what}")
            if self._closed:
                raise Stopped
            return self._items.popleft()

    def close(self) -> None:
        """Ends every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
