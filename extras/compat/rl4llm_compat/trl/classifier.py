"""TRL's reward models: a classifier with one label, as a reward function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from rl4llm.backends.models import load_tokenizer
from rl4llm.core.errors import ConfigError
from rl4llm.data.special import SpecialTokens
from rl4llm.rewards import RewardFailure
from rl4llm_compat.trl.rows import source

FORM = "ForSequenceClassification"
BATCH = 16


class Classifier:
    """Return the logit of a classifier for each prompt with its completion, as TRL does.

    Conversations are rendered by the classifier's own chat template; strings are joined. Special tokens in messages are
    ordinary text. A text that is longer than the classifier's context is a failure.
    """

    def __init__(self, model: Any, *, plain: bool):
        path = source(model)
        if model.config.num_labels != 1:
            raise ConfigError(
                f"reward_funcs: {path!r} has {model.config.num_labels} labels. Accepted: a classifier with num_labels=1."
            )
        self.__name__ = re.sub(r"[^\w-]", "_", Path(path).name)
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = load_tokenizer(path)
        if not plain and not self._tokenizer.chat_template:
            raise ConfigError(f"reward_funcs: the tokenizer of {path!r} has no chat_template. Add one.")
        self._special = SpecialTokens(self._tokenizer, self._rendered)

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | RewardFailure]:
        texts = [self._token_ids(*both) for both in zip(prompts, completions, strict=True)]
        context = self._model.config.get_text_config().max_position_embeddings
        scores: list[float | RewardFailure] = [
            RewardFailure(f"the text has {len(token_ids)} tokens, and the classifier's context {context}")
            for token_ids in texts
        ]
        short = [place for place, token_ids in enumerate(texts) if len(token_ids) <= context]
        for start in range(0, len(short), BATCH):
            places = short[start : start + BATCH]
            logits = self._logits([texts[place] for place in places])
            for place, logit in zip(places, logits, strict=True):
                scores[place] = logit
        return scores

    def _logits(self, texts: Sequence[list[int]]) -> list[float]:
        used = {token for token_ids in texts for token in token_ids}
        # The model reads the last token that is no padding, so padding must be a token that no text has.
        padding = next(token for token in range(len(used) + 1) if token not in used)
        self._model.config.get_text_config().pad_token_id = padding
        longest = max(map(len, texts))
        rows = [token_ids + [padding] * (longest - len(token_ids)) for token_ids in texts]
        token_ids = torch.tensor(rows, device=self._model.device)
        lengths = torch.tensor([[len(one)] for one in texts], device=self._model.device)
        mask = torch.arange(longest, device=self._model.device) < lengths
        logits: list[float] = (
            self._model(input_ids=token_ids, attention_mask=mask.long()).logits[:, 0].tolist()
        )
        return logits

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._special.encode(self._special.marked(prompt + completion, "user"))
        rows = [self._special.marked_row(message) for message in (*prompt, *completion)]
        return self._special.encode(self._rendered(rows, prompt=False))

    def _rendered(self, rows: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(list(rows), tokenize=False, add_generation_prompt=prompt)
        )


def as_function(item: Any, *, plain: bool) -> Any:
    """Return the function of a classifier, or of the directory or hub name of one; return anything else unchanged.

    Raises ConfigError for other models.
    """
    if isinstance(item, nn.Module):
        if not type(item).__name__.endswith(FORM):
            raise ConfigError(
                f"reward_funcs: a {type(item).__name__} is not a classifier. Accepted: a ...{FORM}."
            )
        return Classifier(item, plain=plain)
    if not isinstance(item, str) or not _names_classifier(item):
        return item
    model = AutoModelForSequenceClassification.from_pretrained(
        item, num_labels=1, dtype="float32", trust_remote_code=False
    )
    return Classifier(model, plain=plain)


def _names_classifier(name: str) -> bool:
    if "/" not in name and not Path(name).is_dir():
        return False
    try:
        config, _ = PretrainedConfig.get_config_dict(name)
    except OSError:
        return False
    return any(form.endswith(FORM) for form in config.get("architectures") or ())
