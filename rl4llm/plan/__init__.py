"""``rl4llm plan``: what a run will do and take, before anything is loaded.

Read `counts.py` (prompts to tokens to micro-batches), `shape.py` (sizes of a model), `memory.py` (bytes by phase),
`advice.py` (which key to change) and `show.py`.
"""

from rl4llm.plan.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
