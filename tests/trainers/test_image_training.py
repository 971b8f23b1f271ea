"""Runs with images: what the policy sees decides what it learns, over turns and after kill -9."""

import io
import json
import signal
import sys
from dataclasses import dataclass
from functools import cache

import PIL.Image
import pytest
import torch
import yaml
from ended_runs import metrics
from forked_python import started
from killed_run import die_after
from rank_processes import RankProcesses
from sweeps import sampled
from vision_models import vision_directories  # noqa: F401 - fixture

from rl4llm import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.algorithms import SDFT
from rl4llm.cli import main
from rl4llm.compose.setup import Given
from rl4llm.compose.trainer import build_trainer
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.images import Picture
from rl4llm.data.load import load_rows
from rl4llm.extensions.view.run import ViewedRun
from rl4llm.extensions.view.server import digests_of, episode_of
from rl4llm.runs.checkpoint import latest_checkpoint

COLOURS = {"red": (220, 40, 40), "blue": (50, 70, 220)}


def picture(name, side=40):
    file = io.BytesIO()
    PIL.Image.new("RGB", (side, side), COLOURS[name]).save(file, format="PNG")
    return file.getvalue()


def rows(*, shown="own"):
    """Return rows that ask for a colour; the image is the row's own, or that of the other colour."""
    other = {"red": "blue", "blue": "red"}
    return [
        {
            "prompt_id": name,
            "prompt": "<image>?",
            "image": picture(name if shown == "own" else other[name]),
            "ground_truth": name,
        }
        for name in COLOURS
    ]


class FirstToken(BaseRewardFunction):
    """Reward a first token by its parity: even for red, odd for blue."""

    def __init__(self):
        super().__init__("first_token")

    def __call__(self, messages, ground_truth, **columns):
        raise NotImplementedError

    def score_batch(self, samples):
        firsts = [sample.policy_spans[0].token_ids[0] for sample in samples]
        return [
            float(first % 2 == (one.ground_truth == "blue"))
            for first, one in zip(firsts, samples, strict=True)
        ]


class Looks(BaseMDPEnv):
    """Show a second image after the first turn."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage.showing("user", "And ", Picture(picture(sample.ground_truth, 60)), "?")]


def trainer(directory, output, *changes, dataset=None, env=None):
    config = load_config(None, [
        f"model.path={directory}", "model.vision=frozen", "model.autocast=none", f"output.dir={output}", "eval.every=0",
        "rollout.prompts=2", "rollout.group_size=16", "rollout.max_tokens=1", "training.lr=3e-3", "max_steps=2",
        "training.schedule=constant", "tracking.tensorboard=false", "deterministic=true", *changes,
    ])  # fmt: skip
    given = Given(dataset=dataset or rows(), reward_functions=[FirstToken()], env_class=env)
    return build_trainer(config, given)


def weights(run):
    return torch.cat([tensor.flatten() for _, tensor in run.backend.weights()])


@pytest.fixture(scope="module")
def directory(vision_directories):  # noqa: F811
    return vision_directories["qwen3_vl"]


def test_the_image_alone_tells_what_to_learn(directory, tmp_path):
    with trainer(directory, tmp_path, "max_steps=45") as run:
        run.train()
    means = [row["reward/mean"] for row in metrics(tmp_path)]
    assert sum(means[:5]) / 5 < 0.7  # any answer is right for one of the two colours
    assert sum(means[-5:]) / 5 > 0.85
    with trainer(
        directory,
        tmp_path / "other",
        "max_steps=1",
        f"model.path={tmp_path / 'model'}",
        dataset=rows(shown="other"),
    ) as run:
        run.train()
    (row,) = metrics(tmp_path / "other")
    assert row["reward/mean"] < 0.3  # the same texts with the neighbour's image: it believes what it sees


def over_turns(directory, output, vision):
    keys = (
        "env.max_steps=2",
        "rollout.prompts=2",
        "checkpoint.every=0",
        f"model.vision={vision}",
        "max_steps=4",
    )
    return trainer(directory, output, *keys, env=Looks)


@dataclass(slots=True)
class Equal(SDFT):
    """A teacher that reads what the policy reads."""

    def privileged_prompts(self, samples, group):
        return [sample.messages[: sample.init_msg_size] for sample in samples]


def test_a_teacher_sees_the_images_of_its_prompt(directory, tmp_path):
    """It says what the policy says where it reads the same, over two turns with an image in each."""
    kl = {}
    for name in (f"{__name__}:Equal", "sdft"):
        output = tmp_path / name.rpartition(":")[2]
        keys = (
            f"algorithm.name={name}",
            "algorithm.demonstration=ground_truth",
            "env.max_steps=2",
            "max_steps=1",
        )
        with trainer(directory, output, *keys, env=Looks) as run:
            run.train()
        (row,) = metrics(output)
        assert row["env/privileged"] == 1
        kl[output.name] = abs(row["teacher_kl"])
    assert kl["Equal"] < 1e-6 < 1e-4 < kl["sdft"]


@pytest.mark.parametrize("vision", sampled(["frozen", "train"], ["train"]))
def test_a_killed_run_with_images_over_turns_ends_the_same(directory, tmp_path, vision):
    with started(__file__, directory, tmp_path / "killed", vision) as program:
        done = program.end(120)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert latest_checkpoint(tmp_path / "killed" / "checkpoints").step == 2
    found = []
    for name in ("whole", "killed"):
        with over_turns(directory, tmp_path / name, vision) as run:
            run.train()
        found.append(weights(run))
    assert torch.equal(*found)
    rows = metrics(tmp_path / "whole")
    assert all(row["mismatch/max"] < 1e-4 for row in rows)  # the engine sees what the trainer sees
    episode = json.loads((tmp_path / "whole/episodes/step-000001.jsonl").read_text().splitlines()[0])
    seen = [image for span in episode["spans"] for image in span.get("images", ())]
    digests = digests_of(episode)
    assert [digest for digest, _, _ in seen] == digests and len(digests) == 2
    assert all((tmp_path / "whole/images" / f"{digest}.png").is_file() for digest in digests)
    viewed = ViewedRun(tmp_path / "whole", "whole")
    viewed.index.refresh(budget_s=float("inf"))
    shown = episode_of(viewed, 0)
    assert {*shown["images"]} == {*digests_of(shown["episode"])} and len(shown["images"]) == 2


def test_a_run_with_images_is_checked_collected_and_imitated(directory, tmp_path):
    stored = [{**row, "image": Picture(row["image"]).to_part()["image_url"]["url"]} for row in rows()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stored))
    config = {
        "model": {"path": str(directory), "vision": "frozen", "autocast": "none"}, "eval": {"every": 0},
        "data": {"path": str(tmp_path / "rows.jsonl")}, "output": {"dir": str(tmp_path / "run")},
        "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 10}],
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 4},
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    assert main(["check", str(tmp_path / "train.yaml")]) == 0
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.json"]  # which is not touched
    assert (
        main(
            [
                "collect",
                str(tmp_path / "train.yaml"),
                "--out",
                str(tmp_path / "played.jsonl"),
                "--prompts",
                "2",
            ]
        )
        == 0
    )
    played = load_rows(tmp_path / "played.jsonl", learns_from="demonstrations", images=True)
    seen = [ChatMessage.from_dict(row["messages"][0]).pictures for row in played]
    assert len(seen) == 8 and {Picture(picture(name)) for name in COLOURS} == {one for (one,) in seen}


def mixed():
    """Return a row with an image and one without, so that of two ranks one has no image."""
    text = {"prompt_id": "text", "prompt": "Which?", "ground_truth": "red"}
    return [rows()[0], text]


def on_a_rank(ranks, directory, output, backend, vision):
    changes = (
        *backend,
        f"model.vision={vision}",
        f"rollout.prompts={2 // ranks.size}",
        "data.shuffle=false",
        "timeout_s=60",
    )
    with trainer(directory, output, *changes, "max_steps=3", dataset=mixed()) as run:
        run.train()
        # the first converts the names
        own = run.backend.weights if ranks.is_first else run.backend.own_weights
        return torch.cat([tensor.flatten() for _, tensor in own()])


@pytest.fixture(scope="module")
def alone(directory, tmp_path_factory):
    """Return alone(vision): the weights after the same steps of one rank, made once."""
    with RankProcesses(size=1) as processes:

        @cache
        def run(vision):
            output = tmp_path_factory.mktemp("one")
            return processes(on_a_rank, directory, output, ["backend.name=torch"], vision)[0]

        yield run


SHARED = [
    pytest.param(backend, vision, id=f"{name}-{vision}", marks=[pytest.mark.deepspeed] * (name == "zero-3"))
    for name, backend in {
        "ddp": ["backend.shard=ddp"],
        "fsdp2": ["backend.shard=fsdp2"],
        "zero-3": ["backend.name=deepspeed", "backend.zero_stage=3"],
    }.items()
    for vision in ("frozen", "train")
]


@pytest.mark.parametrize(
    ("backend", "vision"), sampled(SHARED, lambda case: case.id in ("fsdp2-train", "zero-3-train"))
)
def test_a_rank_without_images_takes_the_same_steps(directory, alone, on_ranks, tmp_path, backend, vision):
    one = alone(vision)
    two, _ = on_ranks(on_a_rank, directory, tmp_path / "two", backend, vision)
    assert (one - two).abs().max() < 2e-4 and not torch.equal(one, torch.zeros_like(one))


def test_an_adapter_beside_a_tower_that_trains_is_refused(directory, tmp_path):
    with pytest.raises(ConfigError):
        trainer(directory, tmp_path, "model.vision=train", "model.lora.rank=4")


@pytest.mark.parametrize(
    "key", ["max_steps=1", "rollout.max_staleness=1", "inference.router=http://127.0.0.1:1"]
)
def test_features_that_sglang_would_keep_are_refused(directory, tmp_path, key):
    keys = "model.vision=train", "inference.name=sglang", key
    with pytest.raises(ConfigError):
        trainer(directory, tmp_path, *keys)


def test_digests_of_hostile_episodes_are_no_paths():
    parts = [{"digest": value} for value in ("../" * 20 + "etc/passwd", "A" * 64, 3, None, "0" * 63 + "\n")]
    assert digests_of({"messages": [{"parts": parts}, {"parts": None}, 3]}) == []
    assert digests_of({"messages": None}) == [] and digests_of([]) == []


def test_images_without_a_tower_stop_a_run_before_it_starts(directory, model_dir, tmp_path):
    with pytest.raises(DataError):
        trainer(directory, tmp_path / "a", "model.vision=none")
    with pytest.raises(Exception, match="sees no images"):
        trainer(model_dir, tmp_path / "b")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


if __name__ == "__main__":
    with over_turns(*sys.argv[1:4]) as run:
        die_after(run, 2)
        run.train()
