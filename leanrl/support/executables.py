"""Around ``torch.compile`` and ``CudaGraphModule``: compiled steps without call overhead, warm-up without a trace."""

from collections.abc import Callable, Iterable
from contextlib import contextmanager

import torch

# CudaGraphModule runs eagerly this many times before it captures.
CUDAGRAPH_WARMUP = 3
# Calls that take a function through compilation, capture and one replay.
WARMUP_CALLS = CUDAGRAPH_WARMUP + 2
# Priority of a CUDA stream whose kernels go before those that wait on streams of the default one, 0.
URGENT = -1

# Samples from PyTorch's own generator, so that a compiled run draws what an eager one draws; and in the same order,
# which PyTorch before 2.13 may change, here where it looks for the least memory.
SAME_SAMPLES = {"fallback_random": True}
if torch.__version__ < (2, 13):
    SAME_SAMPLES |= {"reorder_for_peak_memory": False, "reorder_for_locality": False}
CPU_OPTIONS = {
    **SAME_SAMPLES,
    # Leaves out probe builds that ask whether the compiler knows AVX-512. Any that builds PyTorch's C++20 headers does.
    "cpp.vec_isa_ok": True,
    # tanh from one exp instead of SLEEF's: a sixth of a small update, for an absolute error of 2e-7.
    "cpp.use_decompose_tanh": True,
}


class CompiledStep:
    """A whole step of training, compiled on its first call into one graph that later calls run directly.

    ``torch.compile`` evaluates a Python frame on every call and checks that types, shapes and globals are what they
    were: more than a small policy itself takes. A training step has static shapes, and the tensors
    that it closes over are the same objects for ever (changed in place), so the graph's inputs are collected once.

    Args:
        fn: takes tensors of unchanging shapes and returns one tensor or None. It may change tensors in place, and must
            have no other side effect.
        device: where its tensors are.
        cpp_wrapper: (CPU) call the kernels from C++ instead of Python, which pays where they are many.
        options: (CPU) instead of those in CPU_OPTIONS.

    Raises:
        torch._dynamo.exc.Unsupported: (first call) ``fn`` does not trace as one graph.
    """

    def __init__(
        self, fn: Callable[..., torch.Tensor | None], device: torch.device, cpp_wrapper: bool = True, **options
    ) -> None:
        self._options = compile_options(device, cpp_wrapper, **options)
        self._first_call = torch.compile(fn, backend=self._backend, fullgraph=True, dynamic=False)
        self._graph: Callable | None = None

    def _backend(self, graph_module, example_inputs) -> Callable:
        import torch._inductor  # 3 s that eager runs, of which there may be many processes, do not wait for

        graph = torch._inductor.compile(graph_module, example_inputs, options=self._options)

        def record(*inputs: torch.Tensor):
            outputs = graph(*inputs)
            self._graph, self._inputs, self._outputs = graph, list(inputs), outputs
            return outputs

        return record

    def __call__(self, *args: torch.Tensor) -> torch.Tensor | None:
        if self._graph is None:
            import torch._dynamo

            # Functions made by one factory share their code: Dynamo takes each for a recompilation of the first, and
            # would refuse the ninth. So many may be compiled in all.
            limit = torch._dynamo.config.accumulated_recompile_limit
            # trace_autograd_ops: .backward() is a part of the graph.
            with torch._dynamo.config.patch(recompile_limit=limit, trace_autograd_ops=True):
                result = self._first_call(*args)
            # PyTorch 2.13: where a graph reads a .grad that it has set to None, Dynamo's only None keeps the place, and
            # what this process compiles next takes its own None from there.
            torch._dynamo.variables.ConstantVariable.create(None).source = None
            # Where the arguments and the result stand among the graph's inputs and outputs.
            places = [[i for i, x in enumerate(self._inputs) if x is arg] for arg in args]
            self._places = [(i, place) for i, found in enumerate(places) for place in found]
            self._result = next((i for i, x in enumerate(self._outputs) if x is result), None)
            self._outputs = None
            return result
        inputs = self._inputs.copy()
        for i, place in self._places:
            inputs[place] = args[i]
        outputs = self._graph(*inputs)
        return None if self._result is None else outputs[self._result]


def compile_options(device: torch.device, cpp_wrapper: bool = True, **changes) -> dict:
    """TorchInductor's options for ``device``, those that this PyTorch knows."""
    if device.type != "cpu":
        return SAME_SAMPLES.copy()
    import torch._inductor

    known = set(torch._inductor.list_options())
    options = {"cpp_wrapper": cpp_wrapper, **CPU_OPTIONS, **changes}
    return {name: value for name, value in options.items() if name in known}


def make_executable(
    fn: Callable[..., torch.Tensor | None],
    device: torch.device,
    compile: bool,
    cudagraphs: bool,
    cpp_wrapper: bool = True,
    urgent: bool = False,
    **options,
) -> Callable[..., torch.Tensor | None]:
    """``fn``, compiled (as ``CompiledStep``, with its arguments and demands) and captured as a script's flags say.

    ``urgent`` lets a captured graph's kernels go before those of other streams.
    """
    if compile:
        fn = CompiledStep(fn, device, cpp_wrapper, **options)
    if cudagraphs:
        from tensordict.nn import CudaGraphModule

        fn = CudaGraphModule(fn, warmup=CUDAGRAPH_WARMUP, device=device)
        if urgent:
            # A graph's kernels have the priority of the stream of its capture, whatever stream replays it. On a stream
            # of its own it also shares no workspace of cuBLAS with the graphs that run beside it: PyTorch's ordinary
            # streams are handed out in turn, and come round again.
            if not hasattr(fn, "_capture_stream"):
                raise RuntimeError("CudaGraphModule has no _capture_stream: install tensordict as in requirements/")
            fn._capture_stream = torch.cuda.Stream(device, priority=URGENT)
    return fn


@contextmanager
def untouched(tensors: Iterable[torch.Tensor], device: torch.device):
    """Puts ``tensors`` (in place, at the same addresses) and PyTorch's random generators back on exit."""
    tensors = list(tensors)
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.detach().copy_(copy)
