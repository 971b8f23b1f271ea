"""Compaction: a policy that summarises its own history, and continues from the summary in a new token record."""

import io
import json

import numpy as np
import PIL.Image
import pytest
from packed import pack
from vision_models import vision_directories, vision_of  # noqa: F401 - fixture

from rl4llm import GRPOTrainer, ToolMDPEnv
from rl4llm.algorithms.returns import discounted_returns, token_rewards, turn_returns, turn_rewards
from rl4llm.backends.models import load_tokenizer
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import EnvError
from rl4llm.core.images import Picture
from rl4llm.core.types import ChatMessage, Group, Origin, SamplingParams, images_of
from rl4llm.data.pack import Batching, totals_of
from rl4llm.data.render import Renderer
from rl4llm.data.template import decode
from rl4llm.envs import DebateEnv
from rl4llm.envs.compaction import REQUEST, SUMMARY
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.stored import dump, take_over
from rl4llm.rewards import as_reward_function
from rl4llm.testing import ScriptedClient, check_env
from rl4llm.tracking.episodes import EpisodeLog
from tests.data.test_render import ASK, EACH, chatml
from tests.envs.test_thoughts import thinking

ROWS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Count to seven."},
        ],
        "ground_truth": "",
    }
]
PARAMS = SamplingParams(max_tokens=200)
AT = 150  # tokens: after three short turns


class Counts(BaseMDPEnv):
    """Asks for the next number, until the policy says seven; each turn is rewarded with its number."""

    def respond(self, sample):
        sample.reward_turn(float(sample.current_step))
        return [] if "7" in sample.last_message.content else [ChatMessage("user", "The next number is?")]


class Works(BaseMDPEnv):
    """Answers each turn as a tool."""

    reply_roles = ("tool",)

    def respond(self, sample):
        return [ChatMessage("tool", f"result {sample.current_step}")]


def counting(tokenizer, summary="<think>Hm.</think>I said so much."):
    """Return a policy that counts on, and writes its summary where it is asked for one."""
    counts = {}

    def says(session, prompt_ids):
        if decode(tokenizer, prompt_ids).rfind(REQUEST) > decode(tokenizer, prompt_ids).rfind("next number"):
            return summary
        counts[session] = counts.get(session, 0) + 1
        return f"It is {counts[session]}"

    return says


def rollout(
    tokenizer,
    kind=Counts,
    *,
    at=AT,
    script=None,
    samples=1,
    max_steps=20,
    rows=ROWS,
    vision=None,
    context=4096,
    thoughts="keep",
):
    reward = as_reward_function(lambda completions, **columns: [1.0 for _ in completions])
    env = kind(rows, tokenizer, [reward], max_steps=max_steps, group_size=samples)
    env.compact_at, env.vision, env.thoughts = at, vision, thoughts
    client = ScriptedClient(tokenizer, script or counting(tokenizer), context_length=context)
    return Rollout(env, client)


def play(tokenizer, kind=Counts, params=PARAMS, **options):
    played = rollout(tokenizer, kind, **options)
    result = played.play([0], step=0, sampling_params=params)
    return played._client, result.trajectories, result.failed


def tokens(record):
    return [token for span in record for token in span.token_ids]


def test_next_record_begins_with_the_prompt_and_the_summary(tokenizer):
    _, (one,), _ = play(tokenizer)
    system, question = one.messages[:2]
    assert len(one.forks) >= 2
    for number, record in enumerate(one.records):
        begin = [system, ChatMessage("user", f"{question.content}\n\n{SUMMARY}\n\nI said so much.")]
        expected = Renderer(tokenizer).first(begin if number else one.messages[:2])
        assert list(record[0].token_ids) == expected
        ended = decode(tokenizer, record[-1].token_ids)
        last = number == len(one.forks)
        assert (
            ("Hm." not in ended and ended.startswith("It is 7")) if last else ended.startswith("<think>Hm.")
        )
    assert one.origins == tuple(
        Origin("continues", number, sum(span.author == "policy" for span in record))
        for number, record in enumerate(one.records[:-1])
    )
    assert one.extras["metrics"] == {"compactions": len(one.forks)}


def test_every_prompt_of_the_engine_is_a_prefix_of_a_record(tokenizer):
    client, group, _ = play(tokenizer, samples=3)
    recorded = [tokens(record) for one in group for record in one.records]
    for call in client.calls:
        assert any(record[: len(call.prompt_ids)] == list(call.prompt_ids) for record in recorded)
    longest = max(len(call.prompt_ids) for call in client.calls)
    assert longest < min(one.num_tokens for one in group)  # the context stays smaller than the episode
    assert len({call.params.seed for call in client.calls}) == len(client.calls)
    assert len({one.spans[0] for one in group}) == 1


def test_every_sampled_token_trains_once_with_its_credit(tokenizer):
    client, group, _ = play(tokenizer, samples=2)
    assert [one.num_turns for one in group] == [len(one.turn_rewards) for one in group]
    assert sum(one.num_turns for one in group) == len(client.calls)
    batches = pack(
        group,
        [1.0, -2.0],
        max_tokens_per_batch=4000,
        layout="shared",
        aggregation="sequence",
        totals=totals_of(group),
        pad_token_id=tokenizer.pad_token_id,
    )
    trained = {1.0: 0, -2.0: 0}
    for batch in batches:
        for credit in trained:
            trained[credit] += int((batch.mask_BT & (batch.credits_BT == credit)).sum())
    assert list(trained.values()) == [one.num_policy_tokens for one in group]
    texts = [decode(tokenizer, batch.token_ids_BT[batch.mask_BT].tolist()) for batch in batches]
    assert sum(text.count("I said so much.") for text in texts) == sum(len(one.forks) for one in group) > 2
    assert sum(float(batch.weights_BT.sum()) for batch in batches) == pytest.approx(
        1.0
    )  # an episode counts once


def test_a_turn_earns_what_follows_its_compaction(tokenizer):
    (plain,), (one,) = (play(tokenizer, at=at)[1] for at in (None, AT))
    said = [message.content for message in one.messages if message.role == "assistant"]
    (whole,), (turns,) = (turn_returns(Group("0", (each,)), 1.0).tolist() for each in (plain, one))
    assert [earned for earned, text in zip(turns, said, strict=True) if "said" not in text] == whole
    assert len(one.forks) > 1 and min(turns) == whole[-1] > 0.0
    (batch,) = Batching().pack([one], turn_rewards(Group("0", (one,))).tolist())
    returns_BT = discounted_returns(token_rewards(batch), batch, 1.0)
    assert set(returns_BT[batch.mask_BT].tolist()) == set(turns)


def test_summary_is_a_turn_but_not_a_step(tokenizer):
    _, (one,), _ = play(tokenizer, max_steps=5)
    assert one.stop_reason == "max_steps" and one.num_turns == 5 + len(one.forks) > 5
    said = [message.content for message in one.messages if message.role == "assistant"]
    assert [f"It is {i}" for i in (1, 2, 3, 4, 5)] == [text for text in said if "said" not in text]
    rewarded = [reward for reward, text in zip(one.turn_rewards, said, strict=True) if "said" not in text]
    assert rewarded == [1.0, 2.0, 3.0, 4.0, 5.0] and sum(one.turn_rewards) == 15.0


def test_short_history_is_never_compacted(tokenizer):
    client, (one,), _ = play(tokenizer, at=None)
    assert one.forks == one.origins == () and "metrics" not in one.extras
    assert play(tokenizer, at=4000)[1] == [one]
    first = len(client.calls[0].prompt_ids)
    _, (short,), _ = play(tokenizer, at=first, max_steps=1)  # a prompt alone is no history
    assert short.num_turns == 1


def test_history_of_exactly_that_many_tokens_is_compacted(tokenizer):
    client, _, _ = play(tokenizer, at=None)
    third = len(client.calls[2].prompt_ids)
    for at, turns in ((third, 3), (third + 1, 4)):  # the summary is the last turn of the first record
        assert play(tokenizer, at=at)[1][0].origins[0].turn == turns


@pytest.mark.parametrize("thoughts", ["keep", "drop"])
def test_length_of_a_history_is_that_of_the_prompt(thoughts):
    options = {"kind": Insists, "max_steps": 5, "thoughts": thoughts}
    options["script"] = {"": ["<think>\nI wonder, and wonder, and wonder.\n</think>\n\nIt is 1"]}
    client, plain, _ = play(thinking(), at=None, **options)
    longest = max(len(call.prompt_ids) for call in client.calls)
    assert play(thinking(), at=longest + 1, **options)[1] == plain
    (one,) = play(thinking(), at=longest, **options)[1]
    assert [origin.relation for origin in one.origins].count("continues") == 1


@pytest.mark.parametrize("kind", [Counts, type("GoesOn", (Counts,), {"continue_truncated": True})])
def test_cut_summary_ends_the_episode_as_a_cut_answer(tokenizer, kind):
    long = counting(tokenizer, summary="I said " + "so " * 400)
    _, (one,), failed = play(tokenizer, kind, script=long, max_steps=9)
    assert not failed
    assert (one.stop_reason == "length") is (kind is Counts)
    assert bool(one.forks) is (kind is not Counts)


@pytest.mark.parametrize("summary", ["<think>It never " + "ever " * 400, "<think>Hm.</think>\n"])
def test_history_is_not_replaced_by_an_empty_summary(tokenizer, summary):
    going_on = type("GoesOn", (Counts,), {"continue_truncated": True})
    client, (one,), failed = play(tokenizer, going_on, script=counting(tokenizer, summary))
    assert not failed and (one.stop_reason, one.forks) == ("length", ())
    assert one.num_turns == len(client.calls) and one.messages[-1].content.startswith(summary.strip()[:10])


def test_summary_without_room_ends_the_episode_at_the_context(tokenizer):
    client, (one,), _ = play(tokenizer, context=AT + 20)
    assert one.stop_reason == "context" and one.forks == ()
    assert all(len(call.prompt_ids) < AT + 20 for call in client.calls)


AFTER_TOOL = "m.role == 'user' and messages[loop.index0 - 1].role == 'tool'"
NOT_AFTER_TOOLS = f"{{% if {AFTER_TOOL} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"


def test_request_follows_a_tool_or_ends_its_message():
    each = EACH.replace("{{", f"{NOT_AFTER_TOOLS}{{{{", 1)
    for template, role in ((EACH, "user"), (each, "tool")):
        script = {"": ["It is 1", "I said so.", "It is 2"]}
        _, (one,), failed = play(chatml(template + ASK), Works, script=script, at=1, max_steps=2)
        assert not failed and one.origins[0].relation == "continues"
        (request,) = (message for message in one.messages if REQUEST in message.content)
        assert request.role == role


def test_calls_in_a_summary_are_not_run(tokenizer):
    ran = []

    def note(text: str) -> str:
        """Note a text.

        Args:
            text: what to note
        """
        ran.append(text)
        return "noted"

    call = '<tool_call>{{"name": "note", "arguments": {{"text": "{}"}}}}</tool_call>'
    script = {"": [*map(call.format, ("one", "summary", "two", "summary")), "Answer: 2"]}
    reward = as_reward_function(lambda completions, **columns: [1.0 for _ in completions])
    env = ToolMDPEnv(ROWS, tokenizer, [reward], tools=[note], max_steps=8)
    env.compact_at = 1
    (one,) = (
        Rollout(env, ScriptedClient(tokenizer, script)).play([0], step=0, sampling_params=PARAMS).trajectories
    )
    assert ran == ["one", "two"] and one.extras["metrics"]["tool_calls"] == 2
    assert [origin.turn for origin in one.origins] == [2, 2] and one.messages[-1].content == "Answer: 2"


class Shows(BaseMDPEnv):
    """Shows another picture after each turn."""

    def respond(self, sample):
        return [ChatMessage.showing("user", "And ", picture(sample.current_step), "?")]


def picture(seed):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(file, format="PNG")
    return Picture(file.getvalue())


def test_images_of_the_prompt_stay_and_later_ones_go(vision_directories, tmp_path):  # noqa: F811
    directory = vision_directories["qwen2_5_vl"]
    rows = [{"messages": [ChatMessage.showing("user", picture(9), "?")], "ground_truth": ""}]
    script = {"": ["It is 1", "It is 2", "I saw it.", "It is 3"]}
    played = rollout(
        load_tokenizer(directory), Shows, at=60, script=script, rows=rows, max_steps=3,
        vision=vision_of(directory, tmp_path / "images"),
    )  # fmt: skip
    result = played.play([0], step=0, sampling_params=PARAMS)
    (one,) = result.trajectories
    first, *later = ([place.image for place in images_of(record)] for record in one.records)
    assert len(first) > 1 and later == [[first[0]]]
    EpisodeLog(tmp_path / "episodes").log(0, result.groups)
    (row,) = map(json.loads, (tmp_path / "episodes" / "step-000000.jsonl").read_text().splitlines())
    parts = [part for message in row["messages"] for part in message.get("parts", ()) if part != "?"]
    stored = [part["digest"] for part in parts if isinstance(part, dict)]
    assert stored == [image.digest for image in first]


def test_played_episode_comes_back_with_its_records(tokenizer):
    played, again = rollout(tokenizer), rollout(tokenizer)
    (unit,), (new,) = (each.begin([0], step=0, sampling_params=PARAMS) for each in (played, again))
    played.run(unit.announce())
    played.run(unit.play())
    text = dump(unit)
    assert take_over(new, json.loads(text), oldest=-1)
    (before,), (after,) = (each.finish([item]).trajectories for each, item in ((played, unit), (again, new)))
    assert before == after and len(after.origins) == len(after.forks) > 0


@pytest.mark.parametrize("kind", [Counts, ToolMDPEnv, DebateEnv])
def test_contract_holds_with_compaction(tokenizer, kind):
    reward = as_reward_function(lambda completions, **columns: [1.0 for _ in completions])
    env = kind(ROWS, tokenizer, [reward], max_steps=4)
    env.compact_at = 1
    check_env(env)


def test_each_role_compacts_its_history(tokenizer):
    played = rollout(tokenizer, DebateEnv, at=1, script={"": ["It is 1"]}, max_steps=3)
    (pro,), (con,) = (group.trajectories for group in played.play([0], step=0, sampling_params=PARAMS).groups)
    assert [len(one.origins) for one in (pro, con)] == [2, 2]


class Loops(BaseMDPEnv):
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        llm.generate(env_state.sample_states, sampling_params)
        return env_state


def test_loop_that_ignores_the_key_is_refused(tokenizer):
    with pytest.raises(EnvError):
        play(tokenizer, Loops)


class Insists(BaseMDPEnv):
    """Asks again after each turn."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage("user", f"And {sample.current_step}?")]


def letters(completions, **columns):
    return [float(len(set(str(completion)))) for completion in completions]


@pytest.fixture
def train(model_dir, tmp_path):
    """Return train(name, steps, **keys): trains with a context that holds few of an episode's turns; returns metrics."""
    rows = [{"messages": [{"role": "user", "content": f"Say {i}"}], "ground_truth": ""} for i in range(4)]

    def run(name, steps, **keys):
        options = {"rollout": {"prompts": 2, "group_size": 2, "max_tokens": 6}, "training": {"lr": 1e-3}}
        quiet = {"deterministic": True, "tracking.tensorboard": False, "checkpoint.every": 1, "eval.every": 0}
        own = {"env.max_steps": 8, "env.compact_at": 100, "output": {"dir": str(tmp_path / name)}}
        own |= {"inference": {"name": "local", "context_length": 320}}
        trainer = GRPOTrainer(
            str(model_dir), rows, [letters], env=Insists, max_steps=steps, **options, **quiet, **own | keys
        )
        trainer.train()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "trajectories" in row]

    return run


def test_run_that_compacts_trains_every_turn_and_resumes(train, tmp_path):
    metrics = train("whole", 2)
    train("parts", 1)
    train("parts", 2)
    ends = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    lines = (tmp_path / "whole" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    for episode in map(json.loads, lines):
        records = [episode["spans"], *episode["forks"]]
        assert episode["stop_reason"] == "max_steps" and len(records) > 1
        assert [origin["relation"] for origin in episode["origins"]] == ["continues"] * len(episode["forks"])
        sizes = [sum(len(span["token_ids"]) for span in record) for record in records]
        assert max(sizes) <= 320 < sum(sizes)
        advantages = [
            span.get("advantages") for record in records for span in record if span["author"] == "policy"
        ]
        assert all(map(bool, advantages)) or not any(map(bool, advantages))
        assert (
            len({value for of_turn in advantages for value in of_turn or ()}) <= 1
        )  # the episode's, in each turn
    (row,) = [row for row in metrics if row["step"] == 1]
    assert row["turns"] > 8 and row["env/compactions"] >= 1
    assert row["mismatch/max"] < 1e-4
