"""Memory that is freed in one micro-batch is what the next one asks for: keep it instead of giving it back."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
KEPT = 1 << 30  # bytes of free memory at the top of the heap that stay with the process
STEP = 64 << 20
HEAP_BLOCK = 32 << 20  # larger blocks are mapped by themselves; glibc accepts no more than this


def keep_freed_memory() -> bool:
    """Have glibc hold on to freed memory, up to 1 GiB, for all of this process; False where malloc is another's.

    It otherwise returns large blocks to the kernel at once, and every activation of the next micro-batch faults its pages
    in again, zeroed one by one: about a fifth of the time of an update of a small model on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    options = ((M_MMAP_THRESHOLD, HEAP_BLOCK), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, STEP))
    return all(mallopt(option, value) for option, value in options)
