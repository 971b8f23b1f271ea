"""``rl4llm plan``: what a run will do and need, before anything is loaded.

Read `counts.py` (prompts to tokens to micro-batches), `plan.py`, `memory.py` (bytes by phase), `advice.py`
(which key to change) and `show.py`. Sizes of a model are in `rl4llm.core.model_memory` and `shape.py`.
"""
