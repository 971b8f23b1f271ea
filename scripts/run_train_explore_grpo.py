"""Train with GRPO that samples at several temperatures. Options: scripts/run_train_explore_grpo.py --help"""

import sys

from run_train import main

if __name__ == "__main__":
    sys.exit(main("explore_grpo"))
