"""Compiled steps with little call overhead, CUDA graphs, and a warm-up that leaves no trace."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves

# Ordinary calls before a CUDA graph is captured.
CUDAGRAPH_WARMUP = 3
# Enough calls to compile, capture and replay a function.
WARMUP_CALLS = CUDAGRAPH_WARMUP + 2
# Priority of a CUDA stream whose kernels run before those waiting on streams of the default priority, 0.
URGENT = -1

# Random numbers from PyTorch's own generator, so that a compiled run draws what an eager one draws; and in the same
# order, which PyTorch before 2.13 may change when it reorders operations to save memory (pytorch/pytorch#181136).
SAME_SAMPLES = {"fallback_random": True}
if torch.__version__ < (2, 13):
    SAME_SAMPLES |= {"reorder_for_peak_memory": False, "reorder_for_locality": False}
CPU_OPTIONS = {
    **SAME_SAMPLES,
    # A CompiledStep's inputs keep their sizes, so a check on every call would be wasted.
    "size_asserts": False,
    # Skips trial builds that check for AVX-512: a compiler that can build PyTorch's C++20 headers supports it.
    "cpp.vec_isa_ok": True,
    # Kernels are called from C++, and built apart from what calls them, which gains nothing from -O3.
    "cpp_wrapper": True,
    "cpp_wrapper_build_separate": True,
}
if torch.__version__ < (2, 13):  # the check of IMPALA's masked gather does not compile (pytorch/pytorch#187335)
    CPU_OPTIONS["assert_indirect_indexing"] = False


class CompiledStep:
    """A whole training step, compiled on its first call into one graph that later calls run directly.

    ``torch.compile`` evaluates a Python frame and checks guards (types, shapes, globals) on every call, which takes
    longer than a small policy itself. A training step has static shapes, and the tensors that it closes over are
    always the same objects (changed in place), so the graph's inputs are collected once.

    Args:
        fn: takes tensors of fixed shapes and returns one tensor or None. It may change tensors in place, but must have
            no other side effects.
        device: where its tensors are.

    Raises:
        torch._dynamo.exc.Unsupported: (first call) ``fn`` does not trace as one graph.
    """

    def __init__(self, fn: Callable[..., torch.Tensor | None], device: torch.device) -> None:
        self._options = CPU_OPTIONS if device.type == "cpu" else SAME_SAMPLES
        self._first_call = torch.compile(fn, backend=self._backend, fullgraph=True, dynamic=False)
        self._graph: Callable | None = None

    def _backend(self, graph_module, example_inputs) -> Callable:
        import torch._inductor  # takes 3 s, which eager runs do not need

        graph = torch._inductor.compile(graph_module, example_inputs, options=self._options)

        def record(*inputs: torch.Tensor):
            outputs = graph(*inputs)
            self._graph, self._inputs, self._outputs = graph, list(inputs), outputs
            return outputs

        return record

    def __call__(self, *args: torch.Tensor) -> torch.Tensor | None:
        if self._graph is None:
            import torch._dynamo

            # Functions made by one factory share their code, so Dynamo takes each for a recompilation of the first and
            # would refuse the ninth.
            limit = torch._dynamo.config.accumulated_recompile_limit
            # trace_autograd_ops: .backward() becomes part of the graph. Garbage collection would slow down compilation.
            with torch._dynamo.config.patch(recompile_limit=limit, trace_autograd_ops=True), collector_off():
                result = self._first_call(*args)
            # Dynamo has one object for None. A graph that reads a .grad after setting it to None leaves a source on it,
            # where the next function compiled in this process would look for its own None. (pytorch/pytorch#194749,
            # fixed in 2.15.)
            torch._dynamo.variables.ConstantVariable.create(None).source = None
            # Positions of the arguments and of the result among the graph's inputs and outputs.
            self._places = [(i, j) for i, arg in enumerate(args) for j, x in enumerate(self._inputs) if x is arg]
            self._result = next((i for i, x in enumerate(self._outputs) if x is result), None)
            self._outputs = None
            return result
        inputs = self._inputs.copy()
        for i, place in self._places:
            inputs[place] = args[i]
        outputs = self._graph(*inputs)
        return None if self._result is None else outputs[self._result]


def make_executable(
    fn: Callable, device: torch.device, compile: bool, cudagraphs: bool, urgent: bool = False
) -> Callable[..., torch.Tensor | None]:
    """``fn``, compiled and captured as a script's flags say; ``fn`` as for ``CompiledStep``.

    With ``urgent``, a captured graph's kernels run before those waiting on other streams, and each call overwrites the
    previous result.
    """
    if compile:
        fn = CompiledStep(fn, device)
    if cudagraphs:
        if urgent:
            # A graph's kernels have the priority of the stream that captured it, whichever stream replays it. Graphs
            # captured on one stream also share a cuBLAS workspace, which those that run at the same time must not.
            # CudaGraphModule takes no stream.
            return Captured(fn, torch.cuda.Stream(device, priority=URGENT))
        from tensordict.nn import CudaGraphModule

        fn = CudaGraphModule(fn, warmup=CUDAGRAPH_WARMUP, device=device)
    return fn


class Captured:
    """``fn(*args)`` as one CUDA graph: CUDAGRAPH_WARMUP ordinary calls, then one that captures it, then replays.

    Whatever else ``fn`` reads or writes must stay at the same address (CPU tensors in pinned memory), and nothing in it
    may synchronise with the device. Capture on the main thread; other threads may use CUDA meanwhile, but must not draw
    random numbers there or replay graphs.

    Args:
        fn: takes tensors of fixed shapes, which are copied to where the graph reads them. Once captured, every call
            returns the same object, whose tensors the next call overwrites.
        stream: for the warm-up and the capture. Calls are ordered with the current stream's work, before and after.
    """

    def __init__(self, fn: Callable, stream: torch.cuda.Stream) -> None:
        self._fn = fn
        # The warm-up runs on the capture stream, because libraries allocate a workspace on the first use of a stream.
        self._stream = stream
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: torch.Tensor):
        if self._graph is None and self._calls < CUDAGRAPH_WARMUP:
            self._calls += 1
            current = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = self._fn(*args)
            current.wait_stream(self._stream)
            return result
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            self._args = [arg.clone() for arg in args]
            gc.collect()
            # Destroying a graph would invalidate the capture.
            with collector_off(), torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._result = self._fn(*self._args)
            self._graph = graph
        for ours, arg in zip(self._args, args, strict=True):
            ours.copy_(arg, non_blocking=True)
        self._graph.replay()
        return self._result


@contextmanager
def collector_off() -> Iterator[None]:
    """Python's garbage collector is off in the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def untouched(state, device: torch.device):
    """Restores the tensors in ``state`` (in place, at the same addresses) and PyTorch's random generators on exit.

    Args:
        state: lists, tuples and dictionaries nested to any depth, such as state dicts.
        device: where the tensors are.
    """
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)
