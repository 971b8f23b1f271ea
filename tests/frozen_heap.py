"""Imported last where processes are forked from: the library, and what its most frequent commands import.

The garbage collector of a fork skips all of it. Else the first full collection of each fork goes through half a million
objects, and copies the pages that they lie in. For the same reason a fork that ends does not take apart what torch has
registered, and does not import a package to print which functions torch has compiled.
"""

import atexit
import gc
import importlib
import pkgutil
import re
import weakref

import torch._dynamo.utils

import rl4llm
from rl4llm.config import load_config

OTHERS = re.compile(
    r"rl4llm\.extensions\.(?!(evaluate|export|inspect|quickstart|recipes|servers)\b)|\.inside\b|\b_"
)
"""Extensions whose packages may start threads when they are imported, and programs."""

for module in pkgutil.walk_packages(rl4llm.__path__, "rl4llm.", onerror=lambda name: None):
    if not OTHERS.search(module.name):
        importlib.import_module(module.name)
load_config("configs/quickstart.yaml")
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False
atexit.unregister(torch._dynamo.utils.dump_compile_times)
gc.collect()
gc.freeze()
gc.set_threshold(700, 10, 10)  # Python's default: only imports are left alone
