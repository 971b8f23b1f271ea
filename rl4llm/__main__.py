"""The program ``rl4llm``, also ``python -m rl4llm``."""

import signal


def program() -> None:
    """Load the command line and run it; until it is there Ctrl-C ends the process, as it would any program's."""
    python_takes_it = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a shell said to ignore it
    if python_takes_it:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rl4llm.cli import console_script  # noqa: PLC0415 - it takes a moment, and there would be a traceback

    if python_takes_it:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    console_script()


if __name__ == "__main__":
    program()
