"""Waiting for things between threads, with time limits, until the run ends."""

from queue import Empty, SimpleQueue


class Stopped(Exception):
    """The run ends; whoever waits goes home."""


class Stalled(Exception):
    """Something that was waited for did not come in time; the message says who waited for whom."""


class Mailbox(SimpleQueue):
    """First in, first out, for one reader. Putting never blocks: the number of things that go round bounds it.

    Args:
        timeout: seconds after which a wait is a stall.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._closed = timeout, False

    def get(self, what: str):
        """The oldest item.

        Args:
            what: who waits for whom, for the message of a stall.

        Raises:
            Stopped: the mailbox is closed.
            Stalled: nothing came in time.
        """
        try:
            item = super().get(timeout=self._timeout)
        except Empty:
            raise Stalled(f"waited {self._timeout:g} s for {what}") from None
        if self._closed:
            self.close()  # the next wait, too
            raise Stopped
        return item

    def close(self) -> None:
        """Ends every wait, now and later, whatever is left."""
        self._closed = True
        self.put(None)
