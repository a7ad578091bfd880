"""Passing things between threads, with time limits, until the run ends."""

from contextlib import suppress
from queue import Empty, SimpleQueue


class Stopped(Exception):
    """The run is ending, so the wait is over."""


class Stalled(Exception):
    """Something did not arrive in time; the message says what."""


class Mailbox(SimpleQueue):
    """A first-in, first-out queue for one reader. Putting never blocks; the number of items in circulation is bounded.

    Args:
        timeout: seconds after which a wait counts as a stall.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._closed = timeout, False

    def get(self, what: str):
        """The oldest item.

        Args:
            what: what is waited for, for the message if it stalls.

        Raises:
            Stopped: the mailbox is closed.
            Stalled: nothing arrived in time.
        """
        for _ in range(100):  # short waits, so that a suspended process loses only one of them
            with suppress(Empty):
                item = super().get(timeout=self._timeout / 100)
                if not self._closed:
                    return item
                self.close()  # for the next wait, too
                raise Stopped
        raise Stalled(f"waited {self._timeout:g} s for {what}")

    def close(self) -> None:
        """Ends every wait, now and later, whatever is left in the queue."""
        self._closed = True
        self.put(None)
