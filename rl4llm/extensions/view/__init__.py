"""``rl4llm view runs/x``: a page that shows runs.

Read in this order: `run.py` (the contents of a run's directory), `index.py` (find one episode of many), `texts.py`
(token ids as text), `server.py` (the page's requests), `export.py` (everything in one file). The page itself is in
`page/`: plain modules, as the browser loads them.
"""
