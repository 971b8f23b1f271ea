"""Services that display metrics, each enabled by its key under `tracking`: W&B, OpenTelemetry, Prometheus."""
