"""``python -m rl4llm.extensions.sandbox.serve``: run programs for a trainer on another machine, one per input line.

The machine is the isolation: it is created only for this and then deleted. On it, a program runs as a separate user, so
that it cannot reach this process, which compares its answers with the expected ones.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from dataclasses import asdict

from rl4llm.extensions.sandbox.levels import slot_uids
from rl4llm.extensions.sandbox.sandbox import Sandbox


def main() -> None:
    """Answer until the trainer disconnects."""
    if slot_uids(1) == [None]:
        sys.exit("This must run as root with free uids, so that programs run as another user.")
    sandbox = Sandbox("rlimits", allow_weak=True, slots=1)
    for line in sys.stdin:
        program, limits = pickle.loads(base64.b64decode(line))
        sys.stdout.write(json.dumps(asdict(sandbox.run(program, limits))) + "\n")
        sys.stdout.flush()
    sandbox.close()


if __name__ == "__main__":
    main()
