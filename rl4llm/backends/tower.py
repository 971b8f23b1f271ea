"""The image side of a vision-language model beside the text model: frozen as in the files, or training with it.

The vision-language class itself never runs: it finds images by the ids of tokens and keeps positions as state, and the
policy may sample a placeholder. Here the features of images are computed first and put at places that are given, between
embeddings that the text model computes, and positions are given too. Both ways are compared once, on one image.

Features of a frozen image side are computed once per image, a few images in one call. One that trains computes all images
of a batch in one call, and the probe for a batch without images, so that ranks which share its weights make as many calls.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl4llm.backends.model_files import model_directory, whole_checkpoint, without_reports
from rl4llm.backends.models import check_finite, hub_options, without_progress_bars
from rl4llm.backends.runner import nothing_of
from rl4llm.core.errors import ModelError
from rl4llm.core.images import IMAGE_SIDE, TOWER, Image
from rl4llm.data.vision import Vision
from rl4llm.runtime.ranks import Ranks

FULL, SLIDING = "full_attention", "sliding_attention"
MARKS = ("mm_token_type_ids", "token_type_ids")  # classes' names for what marks the tokens of images
FEATURE_BYTES = 1 << 28  # of features that are kept, at least those of the last request
TOGETHER = 1024  # tokens of images that a frozen image side computes in one call, if they are several
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Tower:
    """Computes what a text model sees of images.

    It is not a module of the text model: where it is frozen, no optimizer, adapter, checkpoint or process group sees it.
    Where it trains, `add_tower` makes its weights a module of the text model.

    Attributes:
        vision: the sizes, tokens and positions of images.
        names: what the files call its weights.
        trains: whether its weights may change, so that no features are kept.
        both_ways: whether the tokens of an image attend to each other in both directions, as `check` finds.
        sequence: a few tokens with a small image, the `probe`, and its place.
    """

    def __init__(self, module: Any, vision: Vision, names: dict[str, str], *, trains: bool = False):
        self._module, self.vision, self.names = module, vision, names
        self.trains, self.both_ways = trains, False
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self.sequence = vision.probe()
        self.probe = self.sequence[1][0].image

    @classmethod
    def read(cls, path: str | Path, vision: Vision, dtype: torch.dtype, *, trains: bool = False) -> Tower:
        """Read the image side of a checkpoint."""
        module, names = _image_side(str(model_directory(path)), dtype)
        return cls(module, vision, names, trains=trains)

    @property
    def parts(self) -> nn.ModuleDict:
        """Return the modules with its weights."""
        modules = {name: part for name, part in self._module.named_children() if name != "language_model"}
        return nn.ModuleDict(modules)

    def __deepcopy__(self, memo: Any) -> Tower:
        return self  # its weights are those of the original

    def features(self, images: Sequence[Image], device: torch.device) -> Tensor:
        """Return what the layers see of these images, (N, K, D) for all their tokens, in order.

        The first of K goes between the embeddings, the others are added after the first layers. Those of a frozen image side
        have no gradient. In the deterministic mode it computes each image alone: after a resume, others are missing.
        """
        if self.trains:
            with torch.autocast(device.type, enabled=False):
                return self._computed(images, device)
        features = self._features_of(images, device)
        most, used = FEATURE_BYTES, {image.digest for image in images}
        size = sum(feature.nbytes for feature in self._kept.values())
        for digest in [digest for digest in self._kept if digest not in used]:
            if size <= most:
                break
            size -= self._kept.pop(digest).nbytes
        return torch.cat(features)

    def forget(self) -> None:
        """Drop the features that are kept, since the weights have changed."""
        self._kept.clear()

    def inputs(
        self, model: PreTrainedModel, token_ids_BT: Tensor, feature_ids_BT: Tensor, images: Sequence[Image]
    ) -> dict[str, Any]:
        """Return the arguments of the text model for tokens among which images stand.

        `feature_ids_BT` numbers the tokens of `images` in the order of `features`; -1 is a token like any other.
        """
        features_NKD = self.features(images, token_ids_BT.device)
        shown_BT = feature_ids_BT >= 0
        chosen_MKD = features_NKD[feature_ids_BT[shown_BT]]
        embedded_BTD = model.get_input_embeddings()(token_ids_BT)
        first_MD = chosen_MKD[:, 0].to(embedded_BTD.dtype)
        arguments = {"inputs_embeds": embedded_BTD.masked_scatter(shown_BT[..., None], first_MD)}
        if chosen_MKD.shape[1] == 1:
            return arguments
        later = [part.contiguous() for part in chosen_MKD[:, 1:].unbind(1)]
        return {**arguments, "visual_pos_masks": shown_BT, "deepstack_visual_embeds": later}

    def masks(
        self, model: PreTrainedModel, real_RT: Tensor, feature_ids_RT: Tensor | None, images: Sequence[Image]
    ) -> Any:
        """Return the attention mask of padded rows: `real_RT` itself where no token sees a later one.

        For images that are seen both ways it is boolean, (R, 1, T, T), by kind of layer where the model has several.
        """
        if feature_ids_RT is None or not self.both_ways:
            return real_RT
        places_T = torch.arange(real_RT.shape[1], device=real_RT.device)
        ahead_TT = places_T - places_T[:, None]
        seen = (ahead_TT <= 0) | self._same_image(feature_ids_RT, images)
        seen = (seen & (real_RT[:, None] > 0))[:, None]
        config = model.config.get_text_config()
        near = seen & (ahead_TT > -(getattr(config, "sliding_window", None) or len(places_T)))
        kinds = {FULL: seen, SLIDING: near}
        return {kind: kinds.get(kind) for kind in getattr(config, "layer_types", None) or ()} or seen

    def opened(
        self, mask_B1SK: Tensor, places_BS: Tensor, feature_ids_BS: Tensor, images: Sequence[Image]
    ) -> Tensor:
        """Return an additive mask of tokens at `places_BS` of K, in which images that are seen both ways are open."""
        if not self.both_ways:
            return mask_B1SK
        together_BSS = self._same_image(feature_ids_BS, images)
        open_BSK = torch.zeros_like(mask_B1SK[:, 0], dtype=torch.bool)
        open_BSK.scatter_(2, places_BS[:, None].expand_as(together_BSS), together_BSS)
        return mask_B1SK.masked_fill(open_BSK[:, None], 0.0)

    def without_images(self, model: PreTrainedModel, token_ids_BT: Tensor) -> dict[str, Any]:
        """Return the arguments of the text model for tokens without images.

        Modules run in the same order as with images, since ranks that share weights gather them in that order. The result
        depends on all weights that train, with a gradient of 0 for those of the image side.
        """
        nothing = nothing_of(self.features([self.probe], token_ids_BT.device)) if self.trains else 0.0
        return {"inputs_embeds": model.get_input_embeddings()(token_ids_BT) + nothing}

    def among(self, positions: Sequence[int], alone: int) -> dict[str, Any]:
        """Return what a batch of one row has besides tokens, if its first tokens are those of `sequence`.

        `positions` are those of its tokens. The last `alone` belong to a trajectory without that prompt.
        """
        _, places = self.sequence
        features = torch.full((1, len(positions)), -1)
        features[0, places[0].offset : places[0].end] = torch.arange(places[0].length)
        arguments = {"feature_ids_BT": features, "images": (self.probe,)}
        if self.vision.axes == 1:
            return arguments
        shared, alone_axes = (
            self.vision.positions(max(positions) + 1, image_places) for image_places in (places, ())
        )
        axes = np.concatenate([shared[positions[:-alone]], alone_axes[positions[-alone:]]])
        return {**arguments, "axes_BTA": torch.from_numpy(axes)[None]}

    def check(self, model: PreTrainedModel) -> None:
        """Raise ModelError unless the text model with these inputs computes what the family's class computes."""
        token_ids, places = self.sequence
        device = next(model.parameters()).device
        ids_BT = torch.tensor([token_ids], device=device)
        shown_BT = torch.zeros_like(ids_BT)
        shown_BT[0, places[0].offset : places[0].end] = 1
        every_BT = torch.ones_like(ids_BT)
        feature_ids_BT = torch.where(shown_BT > 0, shown_BT.cumsum(-1) - 1, -1)
        axes = torch.from_numpy(self.vision.positions(len(token_ids), places)).to(device)
        apart: dict[bool, float] = {}
        with torch.no_grad():
            inputs = self.inputs(model, ids_BT, feature_ids_BT, [self.probe])
            marks = {
                name: shown_BT for name in MARKS if name in inspect.signature(self._module.forward).parameters
            }
            expected = self._class_states(
                model.base_model, input_ids=ids_BT, attention_mask=every_BT, **marks
            )
            for self.both_ways in (False, True) if "token_type_ids" in marks else (False,):
                states = model.base_model(
                    **inputs,
                    attention_mask=self.masks(model, every_BT, feature_ids_BT, [self.probe]),
                    position_ids=axes.T[:, None] if axes.shape[1] > 1 else axes.T,
                    use_cache=False,
                ).last_hidden_state
                largest = (states.float() - expected).abs().max()
                apart[self.both_ways] = float(largest / expected.abs().max())
        self.both_ways = min(apart, key=lambda way: apart[way])
        if not apart[self.both_ways] <= TOLERANCES[model.dtype]:
            name = type(self._module).__name__.removesuffix("Model")
            raise ModelError(
                f"model.vision: on one image the states of {name} differ by {min(apart.values()):.1e} of the largest from "
                "those of the family's class, which makes something else of images. Use model.vision=none."
            )

    def _class_states(self, text: nn.Module, **inputs: Tensor) -> Tensor:
        """Return the last states of the family's class around this text model for the probe."""
        module, without = self._module, self._module.language_model
        try:
            module.language_model = text
            output = module(
                **inputs, **self._pixels([self.probe], inputs["input_ids"].device), use_cache=False
            )
        finally:
            module.language_model = without
        states: Tensor = output.last_hidden_state.float()
        return states

    def _same_image(self, feature_ids_RT: Tensor, images: Sequence[Image]) -> Tensor:
        """Return whether two tokens stand for the same place of an image, (R, T, T)."""
        lengths = torch.tensor([self.vision.tokens(image) for image in images], device=feature_ids_RT.device)
        begun_RT = torch.isin(feature_ids_RT, lengths.cumsum(0) - lengths).cumsum(-1)
        place_RT = torch.where(feature_ids_RT >= 0, begun_RT, -1)
        return (place_RT[:, :, None] == place_RT[:, None]) & (feature_ids_RT >= 0)[:, None]

    def _features_of(self, images: Sequence[Image], device: torch.device) -> list[Tensor]:
        missing = [image for image in dict.fromkeys(images) if image.digest not in self._kept]
        for some in self._together(missing):
            # Engines compute in inference mode, whose tensors no backward pass may keep.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
                computed = self._computed(some, device)
                parts = computed.split([self.vision.tokens(image) for image in some])
                self._kept.update(
                    (image.digest, part.clone()) for image, part in zip(some, parts, strict=True)
                )
        for image in images:
            self._kept.move_to_end(image.digest)
        return [self._kept[image.digest] for image in images]

    def _together(self, images: Sequence[Image]) -> Iterator[list[Image]]:
        """Yield images that are computed in one call."""
        most = 0 if torch.are_deterministic_algorithms_enabled() else TOGETHER
        some: list[Image] = []
        for image in images:
            if some and sum(map(self.vision.tokens, (*some, image))) > most:
                yield some
                some = []
            some.append(image)
        if some:
            yield some

    def _computed(self, images: Sequence[Image], device: torch.device) -> Tensor:
        output = self._module.get_image_features(**self._pixels(images, device))
        for image, feature in zip(images, output.pooler_output, strict=True):
            if len(feature) != self.vision.tokens(image):
                raise ModelError(
                    f"The model made {len(feature)} tokens of an image of {image.height} x {image.width} pixels that stands "
                    f"at {self.vision.tokens(image)} places."
                )
        later = getattr(output, "deepstack_features", None) or ()
        return torch.stack([torch.cat(list(layer)) for layer in (output.pooler_output, *later)], dim=1)

    def _pixels(self, images: Sequence[Image], device: torch.device) -> dict[str, Any]:
        if not self.trains and next(self._module.parameters()).device != device:
            self._module.to(device)
        arrays = self.vision.inputs([self.vision.store.pixels(image) for image in images])
        return {name: value.to(device) for name, value in arrays.items()}


def add_tower(
    model: PreTrainedModel,
    path: str | Path,
    vision: Vision,
    shared_by: Ranks | None = None,
    *,
    trains: bool = False,
) -> None:
    """Read the image side of the checkpoint around a text model, and put it beside the model.

    Where it `trains`, its weights become a module of the model. Raises ModelError where it cannot be read, or where text
    model and image side together do not compute what the family's class does; of the ranks `shared_by`, only the first
    holds the text model yet.
    """
    tower = Tower.read(path, vision, model.dtype, trains=trains)
    setattr(model, TOWER, tower)
    if trains:
        model.add_module(IMAGE_SIDE, tower.parts.requires_grad_(True).to(model.device))
        if (whole := whole_checkpoint(model)) is not None:
            whole.renamed = tower.names
    if shared_by is None:
        tower.check(model)
        return
    otherwise = ModelError("model.vision is not accepted; the first rank's message says why.")
    shared_by.agree(lambda: tower.check(model) if shared_by.is_first else None, (ModelError,), otherwise)
    tower.both_ways = shared_by.share(tower.both_ways)


def empty_image_side(path: str | Path) -> Any:
    """Return the image side of a checkpoint on the meta device, from its config alone."""
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(_without_text(str(model_directory(path)))).base_model


def _without_text(path: str) -> Any:
    """Return the config of a vision-language model whose text model is empty."""
    config = copy.deepcopy(AutoConfig.from_pretrained(path, **hub_options(path)))
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types, text.vocab_size, text.pad_token_id = 0, [], 1, None
    return config


def _image_side(path: str, dtype: torch.dtype) -> tuple[Any, dict[str, str]]:
    """Return the vision-language model without its output layer and with an empty text model, and its names in the files."""
    with without_progress_bars(), without_reports():
        model, report = AutoModelForImageTextToText.from_pretrained(
            path,
            config=_without_text(path),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # of the embedding
            use_safetensors=True,
            **hub_options(path),
        )
    if missing := sorted(name for name in report["missing_keys"] if "language_model" not in name):
        raise ModelError(f"The image side of model.path={path!r} is not whole: it has no {missing[0]}.")
    check_finite(model, path)
    prefix = f"{model.base_model_prefix}."
    parameters = {prefix + name: tensor for name, tensor in model.base_model.named_parameters()}
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(parameters)).items()}
    names = {name.removeprefix(prefix): stored.get(id(tensor), name) for name, tensor in parameters.items()}
    return model.base_model.requires_grad_(False).eval(), names
