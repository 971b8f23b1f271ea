"""A model in which an adapter can learn, and a training run through a server."""

import copy

import pytest
import torch
from vowels import WHOLE, check_learned, learn_vowels

from rl4llm.runtime.ranks import Ranks

ADAPTER = {
    "training.lr": 1e-2,
    "max_steps": 10,
    "model.lora.rank": 8,
    "algorithm": {
        "scale_rewards": "none",
        "entropy_coef": 0.005,
    },  # without, one run in six rests at every second letter
}


@pytest.fixture
def adaptable(tokenizer, tmp_path):
    """Write a copy of a model in which an adapter can learn, and return its directory.

    The output layer of a random model is so quiet that what comes before it cannot make a token likely, and it is frozen.
    Louder than this, a policy is certain of what it says from the first step on, and one odd sample throws it over.
    """

    def write(model):
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.model.norm.weight *= 30 / model.config.hidden_size**0.5
        model.save_pretrained(tmp_path / "adaptable")
        tokenizer.save_pretrained(tmp_path / "adaptable")
        return tmp_path / "adaptable"

    return write


@pytest.fixture
def learns():
    """Train a small model through a server, publish one way, and check that it learned from proven weights."""

    def check(model_dir, directory, inference, way):
        keys = ADAPTER if way == "lora" else WHOLE
        learn_vowels(Ranks(), model_dir, directory, inference, sync={"name": way}, **keys)
        check_learned(directory, keys["max_steps"])

    return check
