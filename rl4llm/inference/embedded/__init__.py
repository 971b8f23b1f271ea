"""The engine in the trainer's process: continuous batching on the same tensors that train."""
