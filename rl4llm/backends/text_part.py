"""Causal language models of text parts for which transformers has no such class.

The text part of these families ends as every causal language model does: a linear layer without bias over its last hidden
states, tied to the embedding or not. Their vision-language classes show this; other families are not assumed to be so.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

FAMILIES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")


class TextPart:
    """What such a class adds to the base class of its family."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _text_class: type[PreTrainedModel]

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self._text_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the last `logits_to_keep` tokens, 0 for all; `options` are those of the text model."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **options,
        )
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


@cache
def register_text_part(kind: type[PretrainedConfig]) -> bool:
    """Make transformers' AutoModelForCausalLM know the text part with this config; return whether it is such a part."""
    if kind.model_type not in FAMILIES:
        return False
    text = AutoModel._model_mapping[kind]
    base = next(one for one in text.__mro__[1:] if issubclass(one, PreTrainedModel))
    name = text.__name__.removesuffix("Model") + "ForCausalLM"
    made: Any = type(
        name,
        (TextPart, base, GenerationMixin),
        {"config_class": kind, "_text_class": text, "__module__": __name__, "base_model_prefix": "model"},
    )
    AutoModelForCausalLM.register(kind, made, exist_ok=True)  # which it wants for its own configs
    return True
