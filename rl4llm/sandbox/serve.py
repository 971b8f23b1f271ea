"""``python -m rl4llm.sandbox.serve``: runs programs for a trainer on another machine, a line of standard input for each.

The machine is the wall: it is made for nothing else and thrown away. Within it a program runs as a user of its own, apart
from this process, which compares what it answers with what is expected.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from dataclasses import asdict

from rl4llm.sandbox.levels import slot_uids
from rl4llm.sandbox.sandbox import Sandbox


def main() -> None:
    """Answer until the trainer is gone."""
    if slot_uids(1) == [None]:
        sys.exit("rl4llm.sandbox.serve has to be root with users to give: programs must not be who judges them.")
    sandbox = Sandbox("rlimits", allow_weak=True, slots=1)
    for line in sys.stdin:
        program, limits = pickle.loads(base64.b64decode(line))
        sys.stdout.write(json.dumps(asdict(sandbox.run(program, limits))) + "\n")
        sys.stdout.flush()
    sandbox.close()


if __name__ == "__main__":
    main()
