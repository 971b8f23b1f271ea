"""Scripts written for TRL: its names, and what each becomes in rl4llm.

    from rl4llm_compat.trl import GRPOConfig, GRPOTrainer  # from trl import GRPOConfig, GRPOTrainer

Each name is imported on first use. `table` is the table of options, `joint` combines those that belong together, and
`arguments` has TRL's configs. `script` turns a script's arguments into configuration keys for `trainers`, and `rows` and
`rewards` read TRL's datasets and call its reward functions. docs/migration.md shows the table.
"""

from rl4llm.core.registry import lazy

__getattr__, __all__ = lazy(__name__, __file__)
