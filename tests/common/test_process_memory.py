"""What a process is told about its memory, in processes of their own."""

import subprocess
import sys

import pytest

ARENAS = """
import ctypes, os, tempfile, threading
{before}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
libc.malloc.argtypes, libc.malloc_info.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
together = threading.Barrier(8)
def use():
    together.wait()
    libc.malloc(1 << 16)
    together.wait()
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with tempfile.NamedTemporaryFile() as file:
    out = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, out)
    libc.fclose(out)
    print(file.read().count(b"<heap nr="))
"""
COLLECTOR = """
import gc
from moebius_common.garbage import collect_nothing_yet, spare_what_is_there
class Ring: pass
collect_nothing_yet()
begun = sum(one["collections"] for one in gc.get_stats())
rings = []
for _ in range(100_000): rings.append([rings])
assert sum(one["collections"] for one in gc.get_stats()) == begun, "a start is not held up"
before = len(gc.get_objects())
spare_what_is_there()
assert gc.get_freeze_count() > before // 2, "what is there is not walked any more"
assert gc.isenabled()
ring = Ring(); ring.ring = ring
del ring
assert gc.collect() > 0, "what comes later still is"
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_threads_share_a_few_arenas() -> None:
    few = "from moebius_gateway.allocator import use_few_arenas; use_few_arenas()"
    assert int(run(ARENAS.format(before=""))) > 2
    assert int(run(ARENAS.format(before=few))) <= 2


def test_collections_leave_alone_what_is_there() -> None:
    run(COLLECTOR)
