"""Services that display metrics."""

PROVIDES = {"rl4llm.trackers": {"wandb": "rl4llm.extensions.trackers.wandb:WandbTracker"}}
