"""A supervised command is outside of the terminal's reach, and ends with its launcher."""

import os
import sys

from rl4llm.runtime.supervise import start


def test_ctrl_c_in_a_terminal_reaches_only_the_launcher():
    # a terminal signals only the processes of its session: the launcher asks the command to end, in its order
    process = start([sys.executable, "-c", "import time; time.sleep(60)"], {}, grace_s=5.0)
    try:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        process.terminate()
        process.wait(timeout=60)
