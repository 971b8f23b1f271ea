"""Each Python that a test starts imports this first, see conftest: the garbage collector leaves its imports alone.

SGLang and vLLM fork their processes, which would otherwise import everything again: 28 and 29 s of processor time for a
start, 10 and 12 s now. Nor does SGLang compile the rotation of an image's tokens, for 10 s. The servers of
tests/extensions/servers/test_moe.py start without this.

torch and transformers are half a million objects. Visiting all of them again and again while they are imported, and once
more when the program ends, takes a third of the processor time of a program that does little else.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(20_000, 10, 100)
atexit.register(gc.freeze)

if any("sglang_cpu" in word or word.startswith("vllm.entrypoints") for word in sys.orig_argv):
    import multiprocessing

    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    forks = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force: None
    multiprocessing.get_context = lambda method=None: forks
