"""The program ``rl4llm``, also ``python -m rl4llm``."""

import os
import signal
import sys
from contextlib import suppress


def program() -> None:
    """Load the command line and run it; until it is there Ctrl-C ends the process, as it would any program's.

    What lies in the working directory can be imported, as with ``python -m``, but hides nothing that is installed.
    """
    with suppress(FileNotFoundError):  # it was deleted
        if not sys.flags.safe_path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    python_takes_it = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a shell said to ignore it
    if python_takes_it:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rl4llm.cli import console_script  # noqa: PLC0415 - it takes a moment, and there would be a traceback

    if python_takes_it:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    console_script()


if __name__ == "__main__":
    program()
