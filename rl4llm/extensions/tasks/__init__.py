"""Tasks in directories: an instruction, an image, hidden tests and a solution.

Read `task.py` (what a directory says), `rows.py` (directories as a dataset), `grade.py` (the tests after an episode),
`verdict.py` (what tests write), `check.py` (solutions and empty agents) and `swe.py` (SWE-bench's rows as directories).
"""
