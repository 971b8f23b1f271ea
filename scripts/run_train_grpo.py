"""Train with GRPO. Options: scripts/run_train_grpo.py --help"""

import sys

from run_train import main

if __name__ == "__main__":
    sys.exit(main("grpo"))
