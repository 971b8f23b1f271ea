"""The program ``rl4llm``, which ``python -m rl4llm`` also starts."""

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress


def program() -> None:
    """Import the command line and run it. Until it is imported, Ctrl-C ends the process without a traceback.

    Modules in the working directory can be imported, as with ``python -m``, but installed ones come first.
    """
    atexit.register(gc.freeze)  # else Python visits all objects of torch and transformers at its end
    with suppress(FileNotFoundError):  # the working directory was deleted
        if not sys.flags.safe_path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    # Another handler means that a shell told the process to ignore it.
    python_takes_it = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_takes_it:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rl4llm.cli import console_script  # noqa: PLC0415 - a slow import, which Ctrl-C would end with a traceback

    if python_takes_it:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    console_script()


if __name__ == "__main__":
    program()
