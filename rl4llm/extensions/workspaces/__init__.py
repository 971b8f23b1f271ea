"""Workspaces: directory trees that commands of an agent or a policy see as their whole machine.

    pool = Workspaces(image="host")
    workspace = await pool.open()
    result = await workspace.run(["sh", "-c", "echo 42 > answer; cat answer"], wall_s=10)     # result.output == "42\\n"
    await workspace.changes()                                                                # a diff against the image
    await workspace.close()

A workspace is copy-on-write over a read-only image. Its files stay from one start to the next, its processes do not.

    trainer ── keeper ─┬─ holder of a workspace: its mounts and limits ── bwrap ── the program
                       ├─ gate of the workspace: its connections to the host
                       └─ holder ...

The keeper ends with the trainer, also by `kill -9`, and takes processes, mounts and directories with it. Read `pool.py`,
`workspace.py` (what callers hold), `mounted.py` and `containers.py` (its two kinds), `keeper.py`, `holder.py`, `start.py`
(one program), `namespaces.py`, `tree.py` (files from inside), `network.py` and `images.py` (what lies below).
"""

from rl4llm.extensions.workspaces.pool import Workspaces
from rl4llm.extensions.workspaces.workspace import Program, Result, Workspace, WorkspaceError

__all__ = ["Program", "Result", "Workspace", "WorkspaceError", "Workspaces"]
