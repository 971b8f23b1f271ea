"""``rl4llm launch``: the processes of a run, on this machine and on others.

Read in this order: `roles` (the processes of a run, and the command line that each becomes), `launchers` (write and submit
files, one module per launcher) and `ranks`. The last one starts the training processes with torchrun, and restarts them when
one dies.
"""
