"""A reference reads another prompt before the tokens that the policy sampled: its log-probs, and which prompts it reads."""

from dataclasses import dataclass

import pytest
import torch
from ended_runs import TwoTurns, assert_same_weights, metrics, weights
from vowels import Vowels, prompts

from rl4llm.algorithms import SDFT, SDPO
from rl4llm.api import PolicyTrainer
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.core.base_env import BaseMDPEnv, ChatMessage, SampleState
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.data.pack import Batching
from rl4llm.envs.privileged import _behind
from rl4llm.trainers.privileged import fill_reference

TEMPLATE = "Before {demonstration} and {prompt}, {other}."


@dataclass(slots=True)
class Equal(SDFT):
    """A teacher that knows as much as the policy."""

    def privileged_prompts(self, samples, group):
        return [sample.messages[: sample.init_msg_size] for sample in samples]


class Feedback(BaseMDPEnv):
    continue_truncated, text = True, "Wrong."

    def respond(self, sample):
        sample.extras["feedback"] = self.text
        return []


class Marked(Feedback):
    text = "Wrong<|im_end|>"


def trainer(model_dir, directory, algorithm, env=None, rows=None, **overrides):
    options = {
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 5, "temperature": 0.8},
        "training": {"lr": 3e-3},
        "checkpoint": {"every": 0},
        "deterministic": True,
        "max_steps": 3,
        **({"env.max_steps": 2} if env is TwoTurns else {}),
    }
    rows = rows or [{**row, "demonstration": f"de{{prompt}}mo {i}"} for i, row in enumerate(prompts(4))]
    kind = type("Trainer", (PolicyTrainer,), {"algorithm": "sdft"})
    output = {"dir": str(directory)}
    return kind(
        str(model_dir), rows, [Vowels()], algorithm=algorithm, env=env, output=output, **options | overrides
    )


def prepared(run):
    run.publish()
    step = run.collect()
    return step, run.prepare(step)


def alone(model, prompt, answer, temperature=1.0):
    """Return the log-probs of the tokens of an answer after a prompt, from one pass without packing."""
    ids_T = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logprobs_TV = (model(input_ids=ids_T).logits[0].double() / temperature).log_softmax(-1)
    return logprobs_TV[:-1].gather(-1, ids_T[0, 1:, None])[len(prompt) - 1 :, 0].tolist()


def context(*token_ids):
    return TokenSpan.context(token_ids)


def by_place(batches):
    """Return the reference's log-probs by record and place of the token."""
    return {
        (record, place): number
        for batch in batches
        for record, place, number in zip(
            *(
                x[batch.mask_BT].tolist()
                for x in (batch.record_ids_BT, batch.position_ids_BT, batch.ref_logprobs_BT)
            ),
            strict=True,
        )
    }


def sampled_places(spans):
    authors = [span.author for span in spans for _ in span.token_ids]
    return [place for place, author in enumerate(authors) if author == "policy"]


@pytest.mark.parametrize("layout", ["sorted", "packed", "shared"])
@pytest.mark.parametrize("env", [None, TwoTurns], ids=["one-turn", "two-turns"])
def test_the_teachers_log_probs_are_those_of_a_plain_pass(model_dir, tmp_path, layout, env):
    """The prompt is rendered here by the tokenizer's own template; all that follows is what was sampled, verbatim."""
    algorithm = {"name": "sdft", "template": TEMPLATE}
    training = {"layout": layout, "max_tokens_per_batch": 60}
    tokenizer, model = (
        load_tokenizer(str(model_dir)),
        load_model(str(model_dir), dtype="float32", device="cpu"),
    )
    with trainer(model_dir, tmp_path, algorithm, env, training=training).trainer as run:
        _, (update,) = prepared(run)
        numbers, members = by_place(update.batches), 0
        asked = {f"Say {i}.": f"Before de{{prompt}}mo {i} and Say {i}., {{other}}." for i in range(4)}
        for record, spans in enumerate(update.records):
            text = tokenizer.decode(spans[0].token_ids)
            (told,) = (new for old, new in asked.items() if old in text)
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": told}], add_generation_prompt=True, return_dict=False
            )
            rest = [token for span in spans[1:] for token in span.token_ids]
            expected = alone(model, ids, rest, temperature=0.8)
            places = sampled_places(spans)
            before = len(spans[0].token_ids)
            assert [numbers.pop((record, place)) for place in places] == pytest.approx(
                [expected[place - before] for place in places], abs=2e-6
            )
            members += 1
        assert members == 8
        assert not numbers


def test_records_that_were_rewritten_keep_their_places():
    """The teacher reads two of the three records of an episode, and nothing of another trajectory."""

    def record(context, *turns):
        spans = [TokenSpan.context(context)]
        for said, answered in turns:
            spans += [TokenSpan(tuple(said), "policy", (-0.5,) * len(said), 0), TokenSpan.context(answered)]
        return tuple(spans[:-1])

    main = record([1, 2, 3], ([10, 11], [4]), ([12], [4]))
    fork, other = record([1, 2, 3, 5], ([13], [4]), ([14, 15], [4])), record([9], ([16, 17], [4]))
    read = (TokenSpan.context([7] * 6), *main[1:]), (TokenSpan.context([8, 5]), *fork[1:]), None
    whole = Trajectory("p", main, (), {}, 1.0, "done", forks=(fork, other), privileged=read)
    unread = Trajectory("p", record([1, 2, 3], ([18], [4])), (), {}, 0.0, "done")

    def pack(trajectories):
        return Batching("packed", max_tokens_per_batch=12).pack(trajectories, [1.0] * len(trajectories))

    def score(batch):  # the id of a token and, behind the point, its place
        return batch.token_ids_BT + batch.position_ids_BT / 100

    batches = Batching("shared", max_tokens_per_batch=9).pack([unread, whole, unread], [1.0] * 3)
    fill_reference(batches, [unread, whole, unread], pack, score)
    ids = {
        (record, place): token
        for batch in batches
        for record, place, token in zip(
            *(
                x[batch.mask_BT].tolist()
                for x in (batch.record_ids_BT, batch.position_ids_BT, batch.token_ids_BT)
            ),
            strict=True,
        )
    }
    numbers = {ids[key]: number for key, number in by_place(batches).items()}
    places = {10: 6, 11: 7, 12: 9, 13: 2, 14: 4, 15: 5}
    assert {token for token, number in numbers.items() if number == number} == set(places)
    assert set(numbers) == set(range(10, 19))
    assert [numbers[token] for token in places] == pytest.approx(
        [t + place / 100 for t, place in places.items()]
    )


def test_a_record_that_begins_otherwise_is_not_read():
    """What follows the prompt stays, also where the prompt of a group is cut into what its samples share and the rest."""
    before, after, said = context(1, 2, 3), context(7, 8), TokenSpan((5,), "policy", (-0.5,), 0)
    for opening in ([context(1, 2, 3, 4)], [context(1), context(2, 3, 4)], [context(1, 2, 3), context(4)]):
        assert _behind(after, before, (*opening, said), room=4) == (after, context(4), said)
    assert _behind(after, before, (before, said, context(4), said), room=5) == (after, said, context(4), said)
    assert _behind(after, before, (context(1, 2, 4), said), room=9) is None
    assert _behind(after, before, (context(1, 2), said), room=9) is None


def test_a_teacher_that_knows_no_more_teaches_nothing(model_dir, tmp_path):
    norms = {}
    for name in (f"{__name__}:Equal", "sdft"):
        with trainer(model_dir, tmp_path / name[-5:], {"name": name}).trainer as run:
            step, (update,) = prepared(run)
            norms[name[-5:]] = run.update(update, step)["grad_norm"]
    assert norms["Equal"] < 1e-5
    assert norms["sdft"] > 1e-2


def test_without_a_right_answer_or_feedback_nothing_trains(model_dir, tmp_path):
    run = trainer(model_dir, tmp_path, {"name": "sdpo", "solved_at": 2.0}, max_steps=2)
    before = {name: tensor.clone() for name, tensor in run.trainer.backend.weights()}
    assert_same_weights(before, weights(run.train()))
    assert all(row["update/empty"] == 1 and row["env/privileged"] == 0 for row in metrics(tmp_path))


@pytest.mark.parametrize(("env", "share"), [(Feedback, 1), (Marked, 0)])
def test_feedback_with_refused_special_tokens_is_not_read(model_dir, tmp_path, env, share):
    options = {"data": {"special_tokens": "refuse"}, "max_steps": 1}
    trainer(model_dir, tmp_path, {"name": "sdpo", "solved_at": 2.0}, env, **options).train()
    assert metrics(tmp_path)[0]["env/privileged"] == share


def test_a_prompt_that_leaves_no_room_is_not_read(model_dir, tmp_path):
    rows = [{**row, "demonstration": "x " * (3000 if i % 2 else 1)} for i, row in enumerate(prompts(4))]
    trainer(model_dir, tmp_path, {"name": "sdft"}, rows=rows, rollout={"prompts": 4}, max_steps=1).train()
    assert metrics(tmp_path)[0]["env/privileged"] == 0.5


@pytest.mark.parametrize(("lora", "quantize"), [(0, "none"), (2, "none"), (2, "nf4")])
def test_teachers_are_the_policy_its_start_or_its_mean(model_dir, tmp_path, lora, quantize):
    """The mean, after each step, moves a quarter of the way to the policy."""
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    for teacher in ("live", "base", "ema"):
        algorithm = {"name": "sdft", "teacher": teacher, "teacher_rate": 0.25}
        options = {"model.lora.rank": lora, "model.quantize": quantize, "training": {"lr": 3e-2}}
        with trainer(model_dir, tmp_path / teacher, algorithm, **options).trainer as run:
            start = {name: tensor.clone() for name, tensor in run.backend.weights()}
            mean = dict(start)
            for _ in range(3):
                policy = {name: tensor.clone() for name, tensor in run.backend.weights()}
                step, (update,) = prepared(run)
                if run.step:
                    mean = {name: old.lerp(policy[name], 0.25) for name, old in mean.items()}
                model = load_model(str(model_dir), dtype="float32", device="cpu")
                model.load_state_dict({"live": policy, "base": start, "ema": mean}[teacher], strict=False)
                record = next(one.privileged[0] for group in step.groups for one in group.trajectories)
                expected = alone(model, record[0].token_ids, record[1].token_ids, temperature=0.8)
                found = by_place(update.batches)
                size = len(update.records[0][0].token_ids)
                assert [found[0, size + i] for i in range(len(expected))] == pytest.approx(expected, abs=1e-5)
                run.update(update, step)
                run.step += 1


def sample(index, reward, answer, *messages, feedback=None, **columns):
    prompt = list(messages) or [ChatMessage("user", "2+2?")]
    said = [ChatMessage("assistant", answer)]
    extras = {} if feedback is None else {"feedback": feedback}
    one = SampleState("p", index, prompt + said, "", columns, init_msg_size=len(prompt), extras=extras)
    return one, Trajectory("p", (TokenSpan.context([1]),), tuple(one.messages), {}, reward, "done")


def told(algorithm, *pairs):
    samples, members = zip(*pairs, strict=True)
    read = algorithm.privileged_prompts(samples, Group("p", members))
    return [None if prompt is None else prompt[-1].content for prompt in read]


def test_sdpo_tells_a_right_answer_and_feedback_on_a_wrong_one():
    algorithm = SDPO(template="{prompt}|{solution}|{feedback}")
    wrong, right = (
        sample(0, 0.0, "5", feedback="It is {solution}."),
        sample(1, 1.0, "4 {feedback}", feedback="Fine."),
    )
    solution = "\n\nCorrect solution:\n\n"
    said = "\n\nThe following is feedback from your unsuccessful earlier attempt:\n\nIt is {solution}."
    assert told(algorithm, wrong, right) == [f"2+2?|{solution}4 {{feedback}}|{said}", None]
    assert told(algorithm, wrong, right, sample(2, 2.0, "four"))[1] == f"2+2?|{solution}four|"
    assert told(algorithm, wrong) == [f"2+2?||{said}"]
    assert told(algorithm, sample(0, 0.0, "5"), sample(1, 0.9, "6")) == [None, None]


def test_the_last_message_of_the_user_is_rewritten():
    system, example = (
        ChatMessage("system", "Be brief."),
        [ChatMessage("user", "1+1?"), ChatMessage("assistant", "2")],
    )
    pair = sample(0, 0.0, "4", system, *example, ChatMessage("user", "{a}?"), demonstration="Add {b}.")
    (prompt,) = SDFT(template="{demonstration} {prompt} {c}").privileged_prompts(
        [pair[0]], Group("p", (pair[1],))
    )
    assert prompt == [system, *example, ChatMessage("user", "Add {b}. {a}? {c}")]


@pytest.mark.parametrize(
    ("algorithm", "error", "options"),
    [
        ({"name": "sdft", "demonstration": "solution"}, DataError, {}),
        ({"name": "sdft", "demonstration": "gaps"}, DataError, {}),
        ({"name": "sdft", "teacher": "ema"}, ConfigError, {"model.dtype": "bfloat16"}),
        ({"name": "sdpo", "distill_coef": 0.5}, ConfigError, {"rollout": {"group_size": 1}}),
    ],
)
def test_what_would_teach_nothing_is_refused_before_the_run(model_dir, tmp_path, algorithm, error, options):
    rows = [{**row, "gaps": "a" if i else ""} for i, row in enumerate(prompts(4))]
    with pytest.raises(error):
        trainer(model_dir, tmp_path / "run", algorithm, rows=rows, **options)
    assert not (tmp_path / "run").exists()
