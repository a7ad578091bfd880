"""SIGTERM, SIGUSR1 and the first Ctrl-C ask a run to stop after its current update."""

import contextlib
import os
import signal


class StopRequest:
    """Context manager whose ``requested`` turns true on SIGTERM, SIGUSR1 (SLURM's warning) or the first SIGINT.

    A second SIGINT raises KeyboardInterrupt as usual. The previous handlers are restored on exit.

    Args:
        quiet: print nothing; for every process of a run but the one that prints.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, quiet: bool = False) -> None:
        self.requested = False
        self._quiet = quiet

    def _handle(self, number: int, frame) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # for the next one
        self.requested = True
        if not self._quiet:
            line = f"\n{signal.Signals(number).name}: finishing the update, then checkpointing and stopping\n"
            # os.write, because a signal may interrupt a print, which cannot be re-entered.
            with contextlib.suppress(OSError):  # stderr may be a pipe whose reader the same Ctrl-C killed
                os.write(2, line.encode())

    def __enter__(self) -> "StopRequest":
        self._former = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
