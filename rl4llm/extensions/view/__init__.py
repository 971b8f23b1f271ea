"""``rl4llm view runs/x``: a page that shows runs.

Read in this order: `run.py` (the contents of a run's directory), `index.py` (find one episode of many), `words.py` (what an
episode said, in a line), `story.py` (what happened in a run), `bands.py` (which runs are seeds of one configuration),
`texts.py` (token ids as text), `server.py` (the page's requests), `choice.py` and `export.py` (everything in one file),
`terminal.py` (the same as text). The page itself is in `page/`: plain modules, as the browser loads them.
"""
