"""Commands that look at a setup or a run: `info`, `plan`, `check` (invariants) and `replay` (a failed step)."""
