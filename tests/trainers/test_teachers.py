"""Several teachers: each environment of a mixture has its own, and nothing else changes."""

import copy

import pytest
import torch
from ended_runs import metrics
from mixture_parts import parts

from rl4llm.algorithms import Distill
from rl4llm.api import PolicyTrainer
from rl4llm.backends.models import load_tokenizer
from rl4llm.backends.tiny import build_model, save_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose import trainer as composed
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.trainers.prepare import Preparation
from rl4llm.trainers.teachers import Teachers


def group(name, part, first):
    """Return two trajectories of an environment."""
    spans = [
        (TokenSpan.context([first, 9, 40]), TokenSpan((20 + number, 21, 22), "policy", (-1.0,) * 3, 0))
        for number in range(2)
    ]
    return Group(name, tuple(Trajectory(name, each, (), {}, 1.0, "done", part=part) for each in spans))


@pytest.mark.parametrize("options", [{}, {"divergence": "reverse", "top_k": 4}], ids=["sampled", "reverse"])
@pytest.mark.parametrize("layout", ["shared", "sorted"])
def test_each_environment_has_its_own_teacher(layout, options, model):
    models = {}
    for number, name in enumerate(("sums", "tools", "")):
        models[name] = TorchBackend(copy.deepcopy(model), trains=False)
        with torch.no_grad():
            for parameter in models[name].model.parameters():
                parameter.mul_(1 + 0.3 * number)
    found = [
        group(name or "p", name, 5 + number) for number, name in enumerate(("tools", "", "sums", "tools"))
    ]

    def prepared(reference, **teachers):
        preparation = Preparation(
            algorithm=Distill(**teachers, **options), policy=TorchBackend(model, lr=0.0), reference=reference,
            batching=Batching(layout, "token", 0, 4096, 4096),
        )  # fmt: skip
        (update,) = preparation.prepare(found, step=0).updates
        return update

    mixed = prepared(Teachers(models), teacher_path="t", teachers={"sums": "s", "tools": "t"})
    alone = {name: prepared(each, teacher_path="t") for name, each in models.items()}
    names = [trajectory.part for each in found for trajectory in each.trajectories]
    for number, batch in enumerate(mixed.batches):
        for record in range(len(names)):
            chosen_BT = (batch.record_ids_BT == record) & batch.mask_BT
            expected = alone[names[record]].batches[number]
            for tensor in [
                "ref_logprobs_BT",
                *(["ref_top_logprobs_BTK", "ref_top_ids_BTK"] if options else []),
            ]:
                actual = batch.later[tensor][chosen_BT]
                torch.testing.assert_close(actual, expected.later[tensor][chosen_BT], atol=1e-5, rtol=0)
                assert actual.any() or not chosen_BT.any()


class Student(PolicyTrainer):
    algorithm = "distill"


def run(model_dir, directory, teachers, **options):
    return Student(
        str(model_dir), parts=parts(directory), output={"dir": str(directory / "run")}, max_steps=1, deterministic=True,
        algorithm={"name": "distill", "teachers": teachers, **options},
        **{"rollout.prompts": 4, "rollout.group_size": 2, "rollout.max_tokens": 6, "checkpoint.every": 0, "eval.every": 0},
    )  # fmt: skip


def test_a_mixture_trains_with_a_teacher_for_each_part(model_dir, tmp_path):
    tokenizer, paths = load_tokenizer(model_dir), {}
    names = sorted(parts(tmp_path))
    for seed, name in enumerate(names):
        paths[name] = str(tmp_path / f"teacher-{name}")
        model = build_model(tokenizer, seed=seed + 3, hidden_size=32 + 16 * seed, num_layers=1)
        save_model(model, tokenizer, tmp_path / f"teacher-{name}")
    for wrong in ({names[0]: paths[names[0]]}, {"absent": paths[names[0]], **paths}):
        with pytest.raises(ConfigError):
            run(model_dir, tmp_path, wrong)
    run(model_dir, tmp_path, paths, divergence="forward", top_k=4).train()
    assert [
        row["teacher_divergence"] > 0 for row in metrics(tmp_path / "run") if "teacher_divergence" in row
    ] == [True]


@pytest.mark.parametrize("adapter", [False, True])
def test_teachers_at_paths_are_models_of_the_process(adapter):
    def models(**options):
        return Distill(**options).needs().separate_references(adapter)

    address = "http://127.0.0.1:1"
    assert models(teachers={"sums": "s", "tools": address}) == ["s"]
    assert models(teachers={"sums": "s", "tools": "t"}, teacher_path="p") == ["s", "t", "p"]
    assert models(teachers={"sums": address}, teacher_url=address) == []


def test_each_local_teacher_shapes_batches_and_leaves(model_dir, tmp_path, monkeypatch):
    """As a reference that is alone does: a layout that it cannot compute is not taken, and a server gets its memory."""
    others, asked = [], []

    def build_publisher(*args):
        others.extend(args[4])
        return made(*args)

    made = composed.build_publisher
    monkeypatch.setattr(composed, "build_publisher", build_publisher)
    monkeypatch.setattr(TorchBackend, "layout", lambda self, name: asked.append(self) or name)
    paths = dict.fromkeys(parts(tmp_path), str(model_dir))
    with run(model_dir, tmp_path, paths, teacher_path=str(model_dir)).trainer as trainer:
        teachers = trainer.preparation.reference.references
        assert len(teachers) == 3 and others == [*teachers.values()]
        assert asked == [trainer.backend, *others]
