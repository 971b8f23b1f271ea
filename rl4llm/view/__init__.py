"""A page for looking at runs: ``rl4llm view runs/x``.

Read in this order: `run.py` (what a run's directory says), `index.py` (finding one episode of many), `texts.py` (ids as
text), `server.py` (how the page asks for them), `export.py` (all of it in one file). The page itself is in `page/`: plain
modules, as the browser takes them.
"""

from rl4llm.view.export import export
from rl4llm.view.run import ViewedRun, find_runs
from rl4llm.view.server import serve

__all__ = ["ViewedRun", "export", "find_runs", "serve"]
