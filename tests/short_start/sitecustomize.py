"""Each Python that a test starts imports this first, see conftest: the garbage collector leaves its imports alone.

SGLang forks its processes, which would otherwise import everything again: 28 s of processor time for a start, 10 s now. That
of tests/extensions/servers/test_moe.py starts without this.

torch and transformers are half a million objects. Visiting all of them again and again while they are imported, and once
more when the program ends, takes a third of the processor time of a program that does little else.
"""

import atexit
import gc
import sys

gc.set_threshold(20_000, 10, 100)
atexit.register(gc.freeze)

if any("sglang_cpu" in word for word in sys.orig_argv):
    import multiprocessing

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force: None
