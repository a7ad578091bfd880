"""Settings of the process."""

import platform
import subprocess
import sys

import pytest

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
