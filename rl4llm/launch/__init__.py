"""``rl4llm launch``: the processes of a run, on this machine and on others.

`ranks` starts the processes that train with torchrun, and starts them again when one dies.
"""

from rl4llm.launch.ranks import Nodes, Supervisor, launch

__all__ = ["Nodes", "Supervisor", "launch"]
