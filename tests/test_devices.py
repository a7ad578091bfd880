"""Settings of the process."""

import platform
import subprocess
import sys

import pytest
from scripts import KINDS, run, tiny
from sebulba_runs import DISTRIBUTED, run_alone
from sebulba_runs import tiny as tiny_distributed

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


SKYLAKE = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\nbugs\t\t: bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (SKYLAKE, False),
        (SKYLAKE.replace("avx512_vnni", "avx512_bf16"), True),
        (SKYLAKE.replace("avx512_vnni", "amx_bf16 amx_tile"), True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16 dgh\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd dgh\n", False),
        ("processor\t: 0\n", True),  # who knows
        (None, True),
    ],
)
def test_units_for_bf16(monkeypatch, tmp_path, cpuinfo, expected):
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    assert devices.has_bf16_units() == expected


WARNING = "warning: --amp bf16: this processor has no bf16 units, float32 is faster on it\n"


@pytest.mark.parametrize("amp, features, warning", [("bf16", "", WARNING), ("none", "", ""), ("bf16", "amx_bf16", "")])
@pytest.mark.parametrize("script", [*KINDS, *DISTRIBUTED])
def test_bf16_without_units_is_slow(monkeypatch, tmp_path, capsys, script, amp, features, warning):
    """Which is said once; the run goes on."""
    (tmp_path / "cpuinfo").write_text(f"flags : avx2 {features}\n")
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    if script in DISTRIBUTED:
        flags = tiny_distributed(tmp_path, f"--amp={amp}", "--total-timesteps=256")
        assert run_alone(monkeypatch, script, *flags) == 0
    else:
        flags = ["--total-timesteps=64", f"--amp={amp}", f"--runs-dir={tmp_path}", "--run-name=run"]
        assert run(script, *tiny(script), *flags) == 0
    assert capsys.readouterr().err == warning
