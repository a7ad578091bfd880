"""The device, CPU threads and CPU settings of a run, and errors for what this machine lacks."""

import ctypes
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from leanrl.support.errors import UsageError, bad, flag

# Language, environment variable and usual command of the compiler that --compile needs: on a CPU for TorchInductor's
# kernels, on a GPU for the C code that launches Triton's.
COMPILERS = {"cpu": ("C++", "CXX", "g++"), "cuda": ("C", "CC", "gcc")}
# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def resolve_device(args) -> torch.device:
    """The device named by ``--device {auto,cpu,cuda,cuda:N}``, after checking that the run's modes work on it.

    ``--one-graph`` switches ``--cudagraphs`` on.

    Raises:
        UsageError: no such device; ``--cudagraphs`` or ``--one-graph`` on a CPU; ``--compile`` without a compiler.
    """
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", name):
        raise bad("device", name, "must be auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise bad("device", name, f"this machine has {torch.cuda.device_count()} CUDA devices; try --device cpu")
        if device.index > 0:  # or graphs and pinned memory would use the first one
            torch.cuda.set_device(device)
    for mode in ("one_graph", "cudagraphs"):
        if getattr(args, mode, False) and device.type != "cuda":
            raise UsageError(f"{flag(mode)} needs a CUDA device; this run is on {device}")
    if getattr(args, "one_graph", False):
        args.cudagraphs = True
    if getattr(args, "compile", False) and not has_compiler(device.type):
        language, variable, command = COMPILERS[device.type]
        install = f"install {command} (Debian: apt install {command}) or set {variable}"
        raise UsageError(f"--compile on {device.type} needs a {language} compiler; {install}")
    return device


def has_compiler(device_type: str) -> bool:
    """Whether the compiler that ``--compile`` needs is installed (COMPILERS)."""
    _, variable, command = COMPILERS[device_type]
    return shutil.which(os.environ.get(variable) or command) is not None


def has_bf16_units() -> bool:
    """Whether this processor multiplies in bfloat16; True if PyTorch cannot tell.

    If it does not, ``--amp bf16`` takes two to three times as long as float32.
    """
    # The last name is ARM's.
    told = [has for name, has in torch.cpu.get_capabilities().items() if name in ("avx512_bf16", "amx_bf16", "bf16")]
    return any(told) or not told


def update_threads(requested: int | None, minibatch_size: int) -> int:
    """CPU threads for the update: ``requested``, or what suits a small network at this minibatch size.

    Below about a thousand rows, a 64x64 network is done before a second thread has woken up.
    """
    return requested or (1 if minibatch_size < 1024 else available_cores())


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits PyTorch to one CPU thread; what is compiled in the block always runs on one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def synchronize_stream(device: torch.device) -> None:
    """Waits for this thread's current stream on ``device``, and for no other thread's."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def set_cpu_numerics(num_threads: int, large_matmuls: bool = True) -> None:
    """Sets PyTorch's CPU threads, denormal flushing and float32 matmul library; call it before any work on the CPU.

    Denormals are flushed to 0: Adam's averages decay into them wherever gradients stay 0 (behind a dead ReLU, say), and
    arithmetic on them is many times slower. Threads inherit the setting from the one that starts them.

    Without ``large_matmuls`` MKL does all matmuls: for layers of about 100 units, or where only a network's first and
    last layers are in float32, the call to oneDNN takes longer than the matmul.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(num_threads)
    if large_matmuls:
        use_onednn_matmuls()


def keep_freed_memory() -> None:
    """Keeps the CPU memory that PyTorch frees, instead of returning it to the operating system.

    An update on images frees and reallocates hundreds of megabytes, and the operating system would clear and map every
    page again. The process stays at its peak size. Only glibc has these settings; elsewhere nothing changes.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)  # put large blocks on the heap too,
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # which never shrinks,
        libc.mallopt(M_ARENA_MAX, 1)  # and which all threads share


def use_onednn_matmuls() -> None:
    """Uses oneDNN for float32 matmuls on AMD processors, where MKL, PyTorch's choice, can be slow.

    PyTorch calls oneDNN only if bfloat16 is allowed. Without AMX units oneDNN still computes in float32. A test matmul
    checks the precision; if it is too low, nothing changes. ``args.json`` records the setting.
    """
    settings = torch.backends.mkldnn.matmul
    if "AMD" not in cpu_name() or not torch.backends.mkldnn.is_available():
        return
    x, y = torch.linspace(-1, 1, 2 * 256 * 256).view(2, 256, 256)
    exact = x.double() @ y.double()
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    if (x @ y - exact).abs().max() >= 1e-5 * exact.abs().max():
        settings.fp32_precision = before


def cpu_name() -> str:
    """The processor's name and, on x86, the numbers that tell its generation."""
    text = "".join(path.read_text() for path in Path("/proc").glob("cpuinfo"))  # only Linux has it
    entry = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)\nmodel name\s*: (.*)", text)
    return f"{entry[3]} (family {entry[1]}, model {entry[2]})" if entry else platform.processor() or platform.machine()
