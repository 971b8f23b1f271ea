"""``rl4llm launch``: the processes of a run, on this machine and on others.

In the order of reading: `roles` (what a run consists of, and the command line of each process), `part` (what one process
becomes), `job` (what an engine is given), `engines` (files are written and submitted) with a module for each engine, and
`ranks`, which starts the processes that train with torchrun, and starts them again when one dies.
"""
