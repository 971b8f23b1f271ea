"""Commands that look at a setup or a run: `info`, `plan`, `check` (invariants), `grade` (answers) and `replay` (a step)."""
