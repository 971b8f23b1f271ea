"""Reward and value models in the form that others have: `...ForSequenceClassification` with one label and `score.weight`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from rl4llm.backends.heads import ValueHead
from rl4llm.backends.model_files import is_classifier, model_directory
from rl4llm.backends.models import hub_options
from rl4llm.backends.vision_language import WholeCheckpoint
from rl4llm.core.errors import ConfigError
from rl4llm.core.weights import TensorSpec

SCORE = "score.weight"


def check_classifier(model: PreTrainedModel) -> None:
    """Raise ConfigError for a family that transformers has no classifier for: nobody could load the reward model."""
    if type(model.config) not in AutoModelForSequenceClassification._model_mapping:
        raise ConfigError(
            f"A reward model is saved as a ...ForSequenceClassification, which transformers does not have for "
            f"{type(model).__name__}. Next: start from another family, such as Qwen3 or Llama."
        )


def name_of_classifier(model: PreTrainedModel) -> str:
    """Return the name of a model's class with a score in the place of its output layer."""
    kind = AutoModelForSequenceClassification._model_mapping.get(type(model.config), None)
    return kind.__name__ if kind else type(model).__name__.replace("ForCausalLM", "ForSequenceClassification")


def load_value_head(path: str | Path | None, model: PreTrainedModel) -> ValueHead:
    """Return the score of a classifier's directory as a value head, or a new head for another model or none."""
    head = ValueHead(model.config.get_text_config().hidden_size)
    score_1D = None if path is None else stored_score(path)
    if score_1D is not None:
        head.linear.load_state_dict({"weight": score_1D})  # which refuses more than one label
    return head.to(next(model.parameters()).device)


def stored_score(path: str | Path) -> Tensor | None:
    """Return the score (labels, D) of a classifier's directory or hub name, None for another model's."""
    path = str(model_directory(path))
    config: PretrainedConfig = AutoConfig.from_pretrained(path, **hub_options(path))
    if not is_classifier(config):
        return None
    files = WholeCheckpoint(path, config, **hub_options(path))
    [(_, score)] = files.read([TensorSpec(SCORE, (), torch.float32)])
    return score
