"""Each Python that a test starts imports this first, see conftest: the garbage collector leaves its imports alone.

torch and transformers are half a million objects. Visiting all of them again and again while they are imported, and once
more when the program ends, takes a third of the processor time of a program that does little else.
"""

import atexit
import gc

gc.set_threshold(20_000, 10, 100)
atexit.register(gc.freeze)
