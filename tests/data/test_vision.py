"""What a family makes of an image: the positions of its tokens, and the size at which the model sees it."""

import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoModelForImageTextToText
from vision_families import GRIDS, change
from vision_models import vision_directories, vision_directory, vision_of  # noqa: F401 - fixtures

from rl4llm.core.errors import DataError, ModelError
from rl4llm.core.images import ImagePlace
from rl4llm.data.images import read_picture


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("vision_directory", GRIDS, indirect=True)
def test_positions_are_those_of_the_family(vision_directory):  # noqa: F811
    vision, generator = vision_of(vision_directory), np.random.default_rng(3)
    model = AutoModelForImageTextToText.from_pretrained(vision_directory)
    for _ in range(20):
        token_ids, places = [], []
        for seed in range(generator.integers(0, 4)):
            token_ids += generator.integers(5, 300, generator.integers(min(seed, 1), 6)).tolist()
            height, width = vision.fit(*generator.integers(20, 200, 2).tolist())
            image = vision.store.add(noise(height, width, seed))
            places.append(ImagePlace(image, len(token_ids), vision.tokens(image)))
            token_ids += [vision.placeholder] * vision.tokens(image)
        token_ids += generator.integers(5, 300, 3).tolist()
        seen = [vision.store.pixels(place.image) for place in places]
        grid = vision.inputs(seen)["image_grid_thw"] if seen else None
        shown = torch.zeros(1, len(token_ids), dtype=torch.int)
        for place in places:
            shown[0, place.offset : place.end] = 1
        expected, _ = model.model.get_rope_index(
            torch.tensor([token_ids]), mm_token_type_ids=shown, image_grid_thw=grid
        )
        assert vision.positions(len(token_ids), places).tolist() == expected[:, 0].T.tolist()
        if seen:
            rows = int(grid.prod(-1).sum()) // 4
            assert rows == sum(place.length for place in places)


def test_an_image_is_resized_once(vision_directory):  # noqa: F811
    vision = vision_of(vision_directory)
    picture = read_picture(PIL.Image.fromarray(noise(75, 131)))
    image = vision.see(picture)
    assert vision.fit(image.height, image.width) == (image.height, image.width)
    assert vision.count(picture) == vision.tokens(image)
    if vision.axes > 1:
        with pytest.raises(DataError):
            vision.see(read_picture(PIL.Image.new("RGB", (800, 2))))


OTHERS = {
    "tiles": ("internvl", {"crop_to_patches": True}),
    "crops": ("gemma3", {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }),
    "a cut": ("internvl", {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "do_center_crop": True,
        "crop_size": {"height": 56, "width": 56},
    }),
    "two sizes": ("internvl", {
        "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "size": {"longest_edge": 100},
        "max_image_size": {"longest_edge": 56},
    }),
}  # fmt: skip


@pytest.mark.parametrize("way", OTHERS)
def test_processors_that_do_more_than_resize_are_refused(vision_directories, tmp_path, way):  # noqa: F811
    family, keys = OTHERS[way]
    directory = shutil.copytree(vision_directories[family], tmp_path / "model")
    change(directory / "preprocessor_config.json", keys)
    with pytest.raises(ModelError):
        vision_of(directory)
