"""torchrun for `rl4llm launch`: a rank that fails has printed its error, so torchrun's traceback becomes one line."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from rl4llm.commands.output import say


def main() -> int:
    """Run torchrun with the arguments of this process; return the exit code of the first rank that failed, or 0."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        say(f"Rank {rank} exited with code {failure.exitcode}; see its output above.")
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
