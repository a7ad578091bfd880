"""Around ``torch.compile`` and ``CudaGraphModule``: options, and a warm-up that leaves no trace."""

from collections.abc import Iterable
from contextlib import contextmanager

import torch

# CudaGraphModule runs eagerly this many times before it captures.
CUDAGRAPH_WARMUP = 3
# Calls that take a function through compilation, capture and one replay.
WARMUP_CALLS = CUDAGRAPH_WARMUP + 2

CPU_OPTIONS = {
    # One C++ file a graph instead of one a kernel: builds sooner, and calls the kernels without Python in between.
    "cpp_wrapper": True,
    # With a single file to build, precompiling PyTorch's headers takes longer than it saves.
    "cpp_cache_precompile_headers": False,
    # Four probe builds that ask whether g++ knows AVX-512. Any g++ that builds PyTorch 2.11's C++20 headers does.
    "cpp.vec_isa_ok": True,
    # tanh from one exp: 4 times as fast as SLEEF's, with an absolute error of one float32 rounding (2e-7).
    "cpp.use_decompose_tanh": True,
}


def compile_kwargs(device: torch.device) -> dict:
    """Arguments of ``torch.compile`` for a whole step: one graph, static shapes, options that this PyTorch knows."""
    kwargs = {"fullgraph": True, "dynamic": False}
    if device.type == "cpu":
        known = set(torch._inductor.list_options())
        kwargs["options"] = {name: value for name, value in CPU_OPTIONS.items() if name in known}
    return kwargs


def skip_guards() -> None:
    """Stops Dynamo from checking before each call that types, shapes and globals are what they were.

    Safe once every compiled function has seen the only shapes it will ever see, which warm-up ensures.
    """
    torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


@contextmanager
def untouched(tensors: Iterable[torch.Tensor], device: torch.device):
    """Puts ``tensors`` (in place, at the same addresses) and PyTorch's random generators back on exit."""
    tensors = list(tensors)
    copies = [tensor.clone() for tensor in tensors]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)
