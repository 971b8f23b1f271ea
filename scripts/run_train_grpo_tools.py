"""Train with GRPO in an environment with a Python tool. Options: scripts/run_train_grpo_tools.py --help"""

import sys

from run_train import main

if __name__ == "__main__":
    sys.exit(main("grpo", "env.name=tool", "env.tools=[python]"))
