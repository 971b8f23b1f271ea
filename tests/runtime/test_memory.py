"""Freed memory stays with the process, and the collector skips what was alive before a run."""

import gc
import subprocess
import sys
import weakref

from rl4llm.runtime.cpu import set_aside_what_stays

SCRIPT = """
import ctypes, resource, sys
if sys.argv[1] == "keep":
    from rl4llm.runtime.cpu import keep_freed_memory
    assert keep_freed_memory()

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
SIZE = 16 << 20

def work():
    blocks = [libc.malloc(SIZE) for _ in range(6)]
    for block in blocks:
        libc.memset(block, 1, SIZE)
    for block in reversed(blocks):
        libc.free(block)

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode], check=True, capture_output=True, text=True, timeout=120
    )
    return int(done.stdout)


def test_freed_memory_is_not_faulted_in_again():
    assert faults("keep") < 100
    assert faults("return") > 10_000  # what it is without: 16 MiB are 4,096 pages


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_the_collector_skips_what_was_alive_before_the_run():
    kept, before = Node(), cycle()
    try:
        set_aside_what_stays()
        later = cycle()
        watched = gc.get_objects()
        assert before() is None and all(thing is not kept for thing in watched)
        assert any(thing is later() for thing in watched)
        del watched
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
