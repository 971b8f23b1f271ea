"""Train with DAPO. Options: scripts/run_train_dapo.py --help"""

import sys

from run_train import main

if __name__ == "__main__":
    sys.exit(main("dapo"))
