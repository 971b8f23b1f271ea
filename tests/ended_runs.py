"""What tests read of a run and compare with that of another, and an environment whose episodes have two turns."""

from pathlib import Path

import torch

from rl4llm.core.base_env import BaseMDPEnv, ChatMessage
from rl4llm.tracking.tracker import read_jsonl


class TwoTurns(BaseMDPEnv):
    """Ask for more once."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage("user", "Go on.")]


def metrics(directory, name="metrics.jsonl"):
    """Return the rows of a log of a run."""
    return read_jsonl(Path(directory) / name)


def weights(run):
    """Return a copy of the weights that a trainer ended with."""
    return {name: tensor.clone() for name, tensor in run.trainer.backend.weights()}


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
