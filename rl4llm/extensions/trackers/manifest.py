"""Services that display metrics."""

PROVIDES = {
    "rl4llm.trackers": {
        "opentelemetry": "rl4llm.extensions.trackers.opentelemetry:OpenTelemetryTracker",
        "prometheus": "rl4llm.extensions.trackers.prometheus:PrometheusTracker",
        "wandb": "rl4llm.extensions.trackers.wandb:WandbTracker",
    }
}
