"""Tasks in directories, as Harbor, Terminal-Bench and SWE-bench publish them."""

PROVIDES = {
    "rl4llm.directories": {
        "task.toml": "rl4llm.extensions.tasks.rows:task_rows",
        "task.yaml": "rl4llm.extensions.tasks.rows:task_rows",
    },
    "rl4llm.rewards": {"task": "rl4llm.extensions.tasks.reward:TaskReward"},
    "rl4llm.commands": {"tasks": "rl4llm.extensions.tasks.command"},
    "rl4llm.parts": {
        "tasks": "rl4llm.extensions.tasks.grade:Tasks",
        "names_task": "rl4llm.extensions.tasks.task:names_task",
        "try_tasks": "rl4llm.extensions.tasks.check:try_tasks",
    },
}
