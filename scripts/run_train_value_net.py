"""Train only the value model of PPO. Options: scripts/run_train_value_net.py --help"""

import sys

from run_train import main

if __name__ == "__main__":
    sys.exit(main("ppo", "algorithm.critic_warmup_steps=${max_steps}"))
