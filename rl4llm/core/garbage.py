"""Garbage collection that passes over what stays for the whole run anyway."""

from __future__ import annotations

import gc


def set_aside_what_stays() -> None:
    """Have the collector of this process never again look at what is alive now; what comes later is collected as ever.

    The modules of torch and transformers alone are half a million objects, and each full collection goes through them all:
    0.2 s in which nothing else happens, once for every thousand episodes or so.
    """
    gc.collect()
    gc.freeze()
