"""One CUDA graph for everything that an off-policy script does between two environment steps (--one-graph)."""

from collections.abc import Callable
from functools import cache, partial

import torch

from leanrl.support.executables import URGENT, Captured


def pinned_like(x: torch.Tensor) -> torch.Tensor:
    """Pinned memory of ``x``'s shape and dtype: copies between it and a GPU are asynchronous and can be captured."""
    return torch.empty_like(x, device="cpu", pin_memory=True)


class OneGraph:
    """The function ``advance(timestep_cpu, pattern) -> actions``: one graph per pattern of updates, one replay a call.

    A graph copies what the environments returned to the device, writes the transition, trains, acts, and copies the
    actions to pinned memory. Compared with a ``CudaGraphModule`` per function, this saves copies of the inputs, clones
    of the outputs, and all launches but one.

    Acting waits for the last update that trains the actor, and the host waits only for the actions: later updates of
    the critics run in parallel with acting, and continue while the environments step. The random numbers are still
    those of the functions called one after the other, because a graph draws them in the order of its capture.

    Each pattern is ``Captured``, whose requirements apply.

    Args:
        observe: takes a timestep [N, ...] on the device; writes it to the replay.
        updates: takes the arguments of an update, the first of which is whether it trains the actor, and returns the
            function that runs it. Updates that do not train the actor must not write what ``act`` reads, nor touch what
            it writes.
        act: returns the actions [N, ...].
        device: a CUDA device, where the functions' tensors are.
    """

    def __init__(self, observe: Callable, updates: Callable, act: Callable, device: torch.device) -> None:
        self._observe, self._updates, self._act = observe, updates, act
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._acting_stream = torch.cuda.Stream(device, priority=URGENT)  # the environments wait for it
        # external: the host can wait for it, while other events only order the graph's nodes.
        self._acted = torch.cuda.Event(external=True)
        self._graph = cache(lambda pattern: Captured(partial(self._step, pattern), self._stream))
        self._timestep_cpu: torch.Tensor | None = None
        self._actions_cpu: torch.Tensor | None = None

    def __call__(self, timestep_cpu: torch.Tensor, pattern: tuple[tuple[bool, ...], ...]) -> torch.Tensor:
        """One step.

        Args:
            timestep_cpu: pinned, and the same tensor on every call, since the graphs read it in place. It may be
                overwritten once this returns.
            pattern: the arguments of each update, as in ``UpdateSchedule.patterns``.

        Returns:
            the actions, in pinned memory that the next call overwrites.

        Raises:
            ValueError: ``timestep_cpu`` is not pinned, or not the tensor of the first call.
        """
        if timestep_cpu is not self._timestep_cpu:
            if self._timestep_cpu is not None or not timestep_cpu.is_pinned():
                raise ValueError("OneGraph reads one buffer: it must be pinned, and the tensor of the first call")
            self._timestep_cpu, self._timestep = timestep_cpu, timestep_cpu.to(self._device)
        self._graph(pattern)()
        self._acted.synchronize()
        return self._actions_cpu

    def _step(self, pattern: tuple[tuple[bool, ...], ...]) -> None:
        self._timestep.copy_(self._timestep_cpu, non_blocking=True)
        self._observe(self._timestep)
        actor_is_ready = self._stream.record_event()
        for flags in pattern:
            self._updates(*flags)()
            if flags[0]:
                actor_is_ready = self._stream.record_event()
        self._acting_stream.wait_event(actor_is_ready)
        with torch.cuda.stream(self._acting_stream):
            actions = self._act()
            if self._actions_cpu is None:
                self._actions_cpu = pinned_like(actions)
            self._actions_cpu.copy_(actions, non_blocking=True)
            self._acted.record(self._acting_stream)
        self._stream.wait_stream(self._acting_stream)
