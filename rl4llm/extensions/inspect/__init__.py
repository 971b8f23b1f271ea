"""Commands that look at a setup or a run: `info`, `plan`, `check` (invariants, or a failed step) and `grade` (answers)."""
