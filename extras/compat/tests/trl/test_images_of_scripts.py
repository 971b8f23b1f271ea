"""Scripts of TRL with images: what they show the policy, and which weights train."""

import json

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, LlavaProcessor
from vision_models import vision_directories  # noqa: F401 - fixture

from rl4llm.core.errors import ConfigError, DataError
from rl4llm_compat.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from rl4llm_compat.trl.images import placed
from rl4llm_compat.trl.run import run_script

SMALL = {
    "per_device_train_batch_size": 4,
    "max_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
}
EPISODES = {**SMALL, "num_generations": 2, "max_completion_length": 4}

SCRIPT = """
import sys

import numpy as np
import PIL.Image
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, LlavaProcessor

from trl import GRPOConfig, GRPOTrainer

path = sys.argv[1]
noise = np.random.default_rng(0).integers(0, 256, (4, 48, 64), dtype=np.uint8)
dataset = Dataset.from_dict({
    "image": [PIL.Image.fromarray(pixels) for pixels in noise],
    "problem": ["Which colour, <image>?"] * 4,
    "solution": ["red", "green"] * 2,
})
dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
dataset = dataset.filter(lambda row: row["image"].size[0] < 512)


def convert_to_rgb(example):
    example["image"] = example["image"].convert("RGB")
    return example


def letters(completions, solution, **columns):
    assert solution[0] in ("red", "green")
    return [float(sum(map(ord, said[0]["content"])) % 7) for said in completions]


trainer = GRPOTrainer(
    model=AutoModelForImageTextToText.from_pretrained(path),
    processing_class=LlavaProcessor(
        AutoImageProcessor.from_pretrained(path, backend="pil"), AutoTokenizer.from_pretrained(path)
    ),
    reward_funcs=letters,
    train_dataset=dataset.map(convert_to_rgb),
    args=GRPOConfig(
        "out", per_device_train_batch_size=8, num_generations=8, max_completion_length=4, max_steps=1, bf16=False,
        gradient_checkpointing=False, use_cpu=True, learning_rate=1e-3, warmup_steps=0, lr_scheduler_type="constant",
    ),
)
trainer.train()
trainer.save_model("saved")
"""


@pytest.fixture(scope="module")
def model(vision_directories):  # noqa: F811
    return vision_directories["qwen3_vl"]


def image(seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 70, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def asked(content="?"):
    return [{"role": "user", "content": content}]


def grpo(model, rows, **options):
    return GRPOTrainer(
        model=model, reward_funcs=lambda completions, **columns: [0.0] * len(completions), train_dataset=rows,
        args=GRPOConfig("out", **EPISODES), **options,
    )  # fmt: skip


def test_a_script_with_images_runs_unchanged(place, model):
    (place / "script.py").write_text(SCRIPT)
    run_script(place / "script.py", [str(model)])
    (file,) = place.glob("out/episodes/*1.jsonl")
    episode = json.loads(file.read_text().splitlines()[0])
    ((digest, _, tokens),) = episode["spans"][0]["images"]
    parts = episode["messages"][0]["parts"]
    assert parts == [{"type": "image", "digest": digest}, "Which colour, <image>?"] and tokens == 4
    before, after = (AutoModelForImageTextToText.from_pretrained(each) for each in (model, place / "saved"))
    same = [
        name for name, tensor in before.state_dict().items() if torch.equal(tensor, after.state_dict()[name])
    ]
    assert not same  # TRL trains all weights, those of the image side too
    assert (place / "saved" / "preprocessor_config.json").exists()


def test_what_the_script_freezes_stays(place, model):
    rows = Dataset.from_dict({"prompt": [asked()] * 4, "images": [[image()]] * 4})
    with_adapter = grpo(str(model), rows, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert with_adapter.config.model.vision == "frozen" and with_adapter.config.model.lora.rank == 4
    with_adapter.trainer.close()
    whole = AutoModelForImageTextToText.from_pretrained(model)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_("visual" not in name)
    frozen = grpo(whole, rows)
    assert frozen.config.model.vision == "frozen"
    frozen.trainer.close()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_("patch_embed" not in name)
    with pytest.raises(ConfigError, match="The script froze a part of the model"):
        grpo(whole, rows)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_("layers.0." not in name)
    with pytest.raises(ConfigError, match="The script froze a part of the model"):
        grpo(whole, rows)


def test_conversations_with_images_are_imitated(place, model):
    said = [
        *asked([{"type": "image"}, {"type": "text", "text": "?"}]),
        {"role": "assistant", "content": "red"},
    ]
    rows = [{"messages": said, "images": [image()]}] * 4
    trainer = SFTTrainer(str(model), SFTConfig("out", **SMALL), train_dataset=rows)
    assert trainer.config.model.vision == "train"
    trajectory = trainer.trainer.read(trainer.trainer.dataset[0], "p").trajectories[0]
    assert [len(span.images) for span in trajectory.spans] == [1, *[0] * (len(trajectory.spans) - 1)]
    trainer.trainer.close()


def test_a_processor_with_other_sizes_is_refused(place, model):
    processor = LlavaProcessor(
        AutoImageProcessor.from_pretrained(
            model, backend="pil", size={"shortest_edge": 1024, "longest_edge": 4096}
        ),
        AutoTokenizer.from_pretrained(model),
    )
    with pytest.raises(
        ConfigError, match=r"processing_class has size=.*4096.*save the model and this processor"
    ):
        grpo(str(model), [{"prompt": asked(), "image": image()}] * 4, processing_class=processor)


def test_strings_with_images_are_refused(place, model):
    with pytest.raises(DataError, match="row 0: the row has images, so its prompt must be messages"):
        grpo(str(model), [{"prompt": "Which?", "image": image()}] * 4)


@pytest.mark.parametrize(("content", "shown"), [
    ("a <image>", [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "a <image>"}]),
    ([{"type": "text", "text": "a"}, {"type": "image", "text": None}], None),
    ([{"type": "text", "text": "a"}], None),
])  # fmt: skip
def test_images_stand_where_trl_shows_them(content, shown):
    messages = [{"role": "system", "content": "Look."}, *asked(content), *asked("b")]
    found = placed({"images": [image(), None, image(1)]}, messages)
    assert found[0] == messages[0] and found[2] == messages[2]
    assert found[1]["content"] == (shown or content)
    assert placed({"image": None}, messages) == messages
