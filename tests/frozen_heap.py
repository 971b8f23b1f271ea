"""Imported last where processes are forked from: the garbage collector of a fork skips what was imported before.

Else the first full collection of each fork goes through half a million objects, and copies the pages that they lie in.
"""

import gc

gc.collect()
gc.freeze()
