"""Settings of the process."""

import platform
import subprocess
import sys

import pytest
import torch
from scripts import KINDS, run_tiny

from leanrl.support import devices

# Pages that the process got from the operating system while blocks of 64 MiB were filled and freed, two at a time.
COUNT_PAGES = """
import resource, sys, threading
import torch
from leanrl.support.devices import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(2**24) for _ in range(2)]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if "keep" in sys.argv:
    keep_freed_memory()
for _ in range(2):
    pages()
for _ in range(2):
    thread = threading.Thread(target=pages)
    thread.start()
    thread.join()
"""


def count_pages(*argv):
    told = subprocess.run([sys.executable, "-c", COUNT_PAGES, *argv], check=True, capture_output=True, text=True)
    return [int(line) for line in told.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory on demand")
def test_freed_memory_is_used_again():
    anew, kept = count_pages(), count_pages("keep")
    # 2 MiB of huge pages is the most that one fault may bring.
    assert min(anew) >= 20 * 64 / 2
    # Where the blocks lie settles in the first rounds. A thread finds them there.
    assert kept[1] < anew[1] / 4 and kept[3] < anew[3] / 4


SKYLAKE = {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (SKYLAKE, False),
        (SKYLAKE | {"avx512_bf16": True}, True),
        (SKYLAKE | {"amx_bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "bf16": False}, False),
        ({"architecture": "riscv64"}, True),  # who knows
    ],
)
def test_units_for_bf16(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert devices.has_bf16_units() == expected


def test_pytorch_calls_the_units_so():
    names = {"x86_64": {"avx512_bf16", "amx_bf16"}, "aarch64": {"bf16"}}.get(platform.machine(), set())
    assert names <= torch.cpu.get_capabilities().keys()


WARNING = "warning: --amp bf16: this processor has no bf16 units, float32 is faster on it\n"


@pytest.mark.parametrize("amp, has_units, warning", [("bf16", False, WARNING), ("none", False, ""), ("bf16", True, "")])
@pytest.mark.parametrize("script", KINDS)
def test_bf16_without_units_is_slow(monkeypatch, tmp_path, capsys, script, amp, has_units, warning):
    """Which is said once; the run goes on."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: SKYLAKE | {"amx_bf16": has_units})
    run_tiny(script, tmp_path, "--total-timesteps=64", f"--amp={amp}")
    assert capsys.readouterr().err == warning
