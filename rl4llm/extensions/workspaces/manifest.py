"""Workspaces: where commands of an agent or a policy work on a copy of a file system."""

PROVIDES = {
    "rl4llm.envs": {"shell": "rl4llm.extensions.workspaces.shell:ShellEnv"},
    "rl4llm.parts": {
        "workspaces": "rl4llm.extensions.workspaces:Workspaces",
        "workspace_error": "rl4llm.extensions.workspaces:WorkspaceError",
    },
}
