"""Trainers: the loop of reinforcement learning, and that of learning from a dataset."""
