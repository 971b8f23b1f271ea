"""Programs that are run and repaired: messages show the failed test, and the last program counts.

    python examples/code_repair.py [--model DIRECTORY] [--steps 30]

Instruct models write whole programs in a block of code. What does not define the function continues the column `prompt`, so
a small model with random weights has a program when it says a number. Programs run in the sandbox, for which
scripts/install_sandbox.sh installs what it needs.
"""

from shared import arguments, print_progress, prompts

from rl4llm import GRPOTrainer
from rl4llm.extensions.sandbox.code_env import CodeEnv

BEGUN = "def f():\n    return "


class Rambling(CodeEnv):
    """Takes a turn that was cut short as it is."""

    continue_truncated = True


if __name__ == "__main__":
    options = arguments(__doc__)
    hidden = "\n".join(f"assert f() >= {number}" for number in (0, 3, 6, 9))  # what the last program is worth
    known = [{"fn": "f", "args": [], "expected": 9}]  # shown to the policy
    task = {"entry_point": "f", "prompt": BEGUN, "public_tests": known, "ground_truth": hidden}
    trainer = GRPOTrainer(
        model=options.model,
        dataset=[row | task for row in prompts(f"Complete f:\n{BEGUN}")[:2]],
        env=Rambling,
        max_steps=options.steps,
        rewards=[{"name": "code", "partial": True, "syntax_weight": 0.2}],
        rollout={"prompts": 1, "group_size": 12, "max_tokens": 1},
        training={"lr": 1e-2},
        output={"dir": options.output},
        **{"env.max_steps": 2},
    )
    trainer.train()
    print_progress(options.output)
