"""Everything between two steps of the environments as one CUDA graph, for off-policy scripts."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from leanrl.support.executables import CUDAGRAPH_WARMUP


class OneGraph:
    """The function ``advance(told_cpu, with_actor) -> actions``: one replay of one graph for each pattern of updates.

    A graph copies what the environments said to the device, writes the transition, trains, acts, and copies the actions
    to pinned memory. Against one ``CudaGraphModule`` for each function this saves its copies of the inputs, its clones
    of the outputs, and all launches but one.

    Acting waits for the last update that trains the actor, and the host waits for the actions alone: updates of the
    critics after that run beside the acting, and go on while the environments step. The samples are still those of the
    functions called one after the other, because a graph's random numbers are numbered in the order of its capture.

    The first CUDAGRAPH_WARMUP calls of a pattern run its functions one by one, the next one captures them. Every call
    does the work of one step. Capture on the main thread; other threads may use CUDA meanwhile.

    Args:
        observe: takes told [N, ...] on the device; writes what the environments said.
        updates: by whether it trains the actor, a function without arguments. The one that does not must not touch what
            ``act`` reads or writes.
        act: returns the actions [N, ...].
        device: a CUDA device, where the functions' tensors are.
    """

    def __init__(
        self, observe: Callable, updates: Mapping[bool, Callable[[], None]], act: Callable, device: torch.device
    ) -> None:
        self._observe, self._updates, self._act = observe, updates, act
        self._device = device
        # The warm-up runs on the streams of the capture: libraries make their workspaces on first use of a stream.
        self._stream, self._acting_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # external: a node of the graph that the host can wait for, where others only order the graph's nodes.
        self._acted = torch.cuda.Event(external=True)
        self._calls: Counter[tuple[bool, ...]] = Counter()
        self._graphs: dict[tuple[bool, ...], torch.cuda.CUDAGraph] = {}
        self._told_cpu: torch.Tensor | None = None
        self._actions_cpu: torch.Tensor | None = None

    def __call__(self, told_cpu: torch.Tensor, with_actor: tuple[bool, ...]) -> torch.Tensor:
        """One step.

        Args:
            told_cpu: pinned, and the same tensor at every call: the graphs read it where it lies. It may be written to
                again once this returns.
            with_actor: for each update whether it trains the actor.

        Returns:
            the actions, in pinned memory that the next call overwrites.

        Raises:
            ValueError: ``told_cpu`` is not pinned, or not the tensor of the first call.
        """
        if told_cpu is not self._told_cpu:
            self._take_buffer(told_cpu)
        if with_actor in self._graphs:
            self._graphs[with_actor].replay()
        elif self._calls[with_actor] < CUDAGRAPH_WARMUP:
            self._calls[with_actor] += 1
            self._run(with_actor)
        else:
            self._graphs[with_actor] = self._capture(with_actor)
            self._graphs[with_actor].replay()
        self._acted.synchronize()
        return self._actions_cpu

    def _take_buffer(self, told_cpu: torch.Tensor) -> None:
        if self._told_cpu is not None:
            raise ValueError("OneGraph reads one buffer: told_cpu must be the tensor of the first call")
        if not told_cpu.is_pinned():
            raise ValueError("OneGraph copies without waiting: told_cpu must be in pinned memory")
        self._told_cpu = told_cpu
        self._told = told_cpu.to(self._device)

    def _run(self, with_actor: tuple[bool, ...]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(with_actor)
        current.wait_stream(self._stream)

    def _capture(self, with_actor: tuple[bool, ...]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._step(with_actor)
        return graph

    def _step(self, with_actor: tuple[bool, ...]) -> None:
        self._told.copy_(self._told_cpu, non_blocking=True)
        self._observe(self._told)
        actor_is_ready = self._stream.record_event()
        for flag in with_actor:
            self._updates[flag]()
            if flag:
                actor_is_ready = self._stream.record_event()
        self._acting_stream.wait_event(actor_is_ready)
        with torch.cuda.stream(self._acting_stream):
            actions = self._act()
            if self._actions_cpu is None:
                self._actions_cpu = torch.empty_like(actions, device="cpu", pin_memory=True)
            self._actions_cpu.copy_(actions, non_blocking=True)
            self._acted.record(self._acting_stream)
        self._stream.wait_stream(self._acting_stream)
