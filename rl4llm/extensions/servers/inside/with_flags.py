"""Start a server with more flags than its command line shows.

Every user of a machine can read command lines, so keys are passed in an environment variable, which only the user of
the process can read.

    RL4LLM_SERVER_FLAGS='["--api-key", "KEY"]' python with_flags.py MODULE|SCRIPT.py FLAG ...

Run by the Python of the server's environment, which does not have rl4llm. The keys are hidden in the server's log
lines.
"""

import json
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

VARIABLE = "RL4LLM_SERVER_FLAGS"


def hide(values: Sequence[str]) -> None:
    """Hide these values in log messages: servers log all their options when they start."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        entry = make(*args, **kwargs)
        try:
            text = entry.getMessage()
        except (TypeError, ValueError, KeyError):  # arguments that do not match the format are not logged
            entry.args = ()
            text = entry.msg = str(entry.msg)
        if any(value in text for value in values):
            for value in values:
                text = text.replace(value, "(hidden)")
            entry.msg, entry.args = text, ()
        return entry

    logging.setLogRecordFactory(record)


def main() -> None:
    """Run the module or script like Python would."""
    target, flags = sys.argv[1], json.loads(os.environ.pop(VARIABLE))
    hide([word for word in flags if word and not word.startswith("--")])
    sys.argv[:] = [target, *sys.argv[2:], *flags]
    if target.endswith(".py"):
        sys.path[0] = os.path.dirname(target)
        runpy.run_path(target, run_name="__main__")
    else:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
