"""The program ``rl4llm``, which ``python -m rl4llm`` also starts."""

import atexit
import gc
import os
import signal
import sys
import traceback
from contextlib import suppress

DISTRIBUTIONS = {"antlr4": "antlr4-python3-runtime==4.13.2", "yaml": "pyyaml"}
"""Packages that pip knows under another name."""


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
    try:
        from rl4llm.cli import console_script  # noqa: PLC0415 - a slow import, which Ctrl-C would end with a traceback

        if python_takes_it:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        console_script()
    except ModuleNotFoundError as error:
        package = (error.name or "rl4llm").partition(".")[0]
        if package == "rl4llm" or "--debug" in sys.argv:
            raise
        sys.exit(
            f"{_importer(error)} imports {package!r}, which is not installed. Next: {sys.executable} -m pip install "
            f"{DISTRIBUTIONS.get(package, package)}"
        )


def _importer(error: ModuleNotFoundError) -> str:
    """Return file and line of the import that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
    return f"{frame.filename}:{frame.lineno}"


if __name__ == "__main__":
    program()
