"""Modules under the import paths of michaelnny/rl4llm: ``from rl4llm.trainers.grpo_trainer import GRPOTrainer``.

`rl4llm` and `rl4llm.trainers` find them here. Names with a counterpart of the same name are that; others are answered.
"""
