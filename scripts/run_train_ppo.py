"""Train with PPO. Options: scripts/run_train_ppo.py --help"""

import sys

from run_train import main

if __name__ == "__main__":
    sys.exit(main("ppo"))
