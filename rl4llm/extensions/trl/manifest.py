"""The command that runs scripts of TRL, and the tables of TRL's names."""

PROVIDES = {
    "rl4llm.commands": {"run": "rl4llm.extensions.trl.command"},
    "rl4llm.parts": {"trl_tables": "rl4llm.extensions.trl.table:TABLES"},
}
