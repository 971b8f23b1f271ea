"""Services that display metrics: Weights & Biases, MLflow and Trackio, each enabled by its key under `tracking`.

With `deferred`, training never waits for a slow server.
"""
