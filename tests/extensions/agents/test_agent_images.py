"""Images in what agents ask, through the real packages of OpenAI and Anthropic: exact tokens over turns, and training."""

import base64
import io
import json
import sys

import PIL.Image
import pytest
from later import later
from vision_models import picture, vision_directories, vision_of  # noqa: F401 - fixture
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.backends.models import load_tokenizer
from rl4llm.core.images import Picture
from rl4llm.core.types import SamplingParams, images_of
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient

CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
FIRST, SECOND, OTHER = 1, 2, 3


@pytest.fixture(scope="module", autouse=True)
def _no_traces():
    later.agents.set_tracing_disabled(True)


def png(seed, level=6):
    """Return an image as a file, whose bytes differ by `level`."""
    file = io.BytesIO()
    PIL.Image.fromarray(picture("qwen3_vl", 2, 1 + seed % 2, seed)).save(
        file, format="PNG", compress_level=level
    )
    return file.getvalue()


def uri(*given):
    return Picture(png(*given)).to_part()["image_url"]["url"]


def of_openai(base_url, api_key):
    return later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def of_anthropic(base_url, api_key):
    return later.anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0)


def in_chat(*given):
    return {"type": "image_url", "image_url": {"url": uri(*given), "detail": "high"}}


def in_responses(*given):
    return {"type": "input_image", "image_url": uri(*given), "detail": "auto"}


def in_messages(*given):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(*given)).decode()}
    return {"type": "image", "source": source}


def asking(image, kind="text"):
    return {"role": "user", "content": [{"type": kind, "text": "What is "}, image]}


async def plays_chat(client, again):
    """Ask about an image, answer the call of the tool with another one, and send `again` for the first."""
    asked = {"model": "policy", "tools": [{"type": "function", "function": LOOK}]}
    first = await client.chat.completions.create(messages=[asking(in_chat(FIRST))], **asked)
    said = first.choices[0].message
    seen = [{"type": "text", "text": "This: "}, in_chat(SECOND)]
    replies = [{"role": "tool", "tool_call_id": call.id, "content": seen} for call in said.tool_calls or ()]
    told = [asking(in_chat(*again)), said, *(replies or [{"role": "user", "content": seen}])]
    last = await client.chat.completions.create(messages=told, **asked)
    return last.choices[0].message.content


async def plays_responses(client, again, by_id=False):
    asked = {"model": "policy", "tools": [{"type": "function", **LOOK, "strict": None}]}
    first = await client.responses.create(input=[asking(in_responses(FIRST), "input_text")], **asked)
    seen = [{"type": "input_text", "text": "This: "}, in_responses(SECOND)]
    calls = (item.call_id for item in first.output if item.type == "function_call")
    replies = [{"type": "function_call_output", "call_id": name, "output": seen} for name in calls]
    replies = replies or [{"role": "user", "content": seen}]
    if by_id:
        return (
            await client.responses.create(input=replies, previous_response_id=first.id, **asked)
        ).output_text
    told = [asking(in_responses(*again), "input_text"), *first.output, *replies]
    return (await client.responses.create(input=told, **asked)).output_text


async def plays_messages(client, again):
    tool = {"name": "look", "description": "Looks.", "input_schema": LOOK["parameters"]}
    asked = {"model": "policy", "max_tokens": 100, "tools": [tool]}
    first = await client.messages.create(messages=[asking(in_messages(FIRST))], **asked)
    seen = [{"type": "text", "text": "This: "}, in_messages(SECOND)]
    calls = [block.id for block in first.content if block.type == "tool_use"]
    replies = [{"type": "tool_result", "tool_use_id": name, "content": seen} for name in calls] or seen
    told = [asking(in_messages(*again)), {"role": "assistant", "content": first.content}]
    last = await client.messages.create(messages=[*told, {"role": "user", "content": replies}], **asked)
    return "".join(block.text for block in last.content if block.type == "text")


async def plays_agent(client, again):
    """Let openai-agents run the loop, with a tool that returns an image."""

    @later.agents.function_tool
    def look(at: str) -> list[later.agents.ToolOutputText | later.agents.ToolOutputImage]:
        """Looks."""
        return [
            later.agents.ToolOutputText(text="This: "),
            later.agents.ToolOutputImage(image_url=uri(SECOND)),
        ]

    model = later.agents.OpenAIResponsesModel(model="policy", openai_client=client)
    agent = later.agents.Agent(name="solver", model=model, tools=[look])
    result = await later.agents.Runner.run(agent, [asking(in_responses(FIRST), "input_text")])
    return str(result.final_output)


WAYS = {
    "chat": (of_openai, plays_chat),
    "responses": (of_openai, plays_responses),
    "by id": (of_openai, lambda client, again: plays_responses(client, again, by_id=True)),
    "messages": (of_anthropic, plays_messages),
    "agents": (of_openai, plays_agent),
}


class Watching(ScriptedClient):
    """Keep the tokens and images of each request."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    async def generate(self, prompt_ids, sampling_params, *, session="", images=()):
        self.seen.append((tuple(prompt_ids), tuple(images)))
        return await super().generate(prompt_ids, sampling_params, session=session)


@pytest.fixture
def play(vision_directories):  # noqa: F811
    """Play an episode of an agent against a policy with a script; `sees` tells whether it sees images."""
    runner, directory = Runner(), vision_directories["qwen3_vl"]
    tokenizer, vision = load_tokenizer(directory), vision_of(directory)

    def run(agent, *turns, sees=True):
        client = Watching(tokenizer, {"": list(turns)})
        runner.run(client.load(WeightRef(0)))
        row = {"messages": [{"role": "user", "content": "Begin."}], "ground_truth": "85"}
        env = AgentEnv([row], tokenizer, [as_reward_function("math")], 1, 1, agent=agent)
        env.vision = vision if sees else None
        rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=0, max_failed_share=1.0)
        result = rollout.play([0], step=0, sampling_params=SamplingParams(max_tokens=100))
        env.close()
        return result, client.seen, vision

    yield run
    runner.close()


@pytest.mark.parametrize("way", sorted(WAYS))
def test_images_of_users_and_tools_keep_their_tokens(play, way):
    connect, plays = WAYS[way]

    async def agent(task, base_url, api_key):
        return await plays(connect(base_url, api_key), (FIRST, 0))  # the same image in other bytes

    result, seen, vision = play(agent, f"Let me see.{CALL}", "Answer: 85")
    (trajectory,) = result.trajectories
    assert not result.failed and not trajectory.forks and trajectory.extras["metrics"]["requests"] == 2
    (one, shown), (other, both) = seen
    said = trajectory.policy_spans[0].token_ids
    assert other[: len(one) + len(said)] == one + said
    assert shown == both[:1] and images_of(trajectory.spans) == both
    assert [place.image for place in both] == [vision.see(Picture(png(seed))) for seed in (FIRST, SECOND)]
    for place in both:
        assert {*other[place.offset : place.end]} == {vision.placeholder}
        assert place.length == vision.tokens(place.image)
    roles = [message.role for message in trajectory.messages if message.role != "system"]
    assert roles == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("way", ["chat", "responses", "messages"])
def test_another_image_in_the_history_begins_a_fork(play, way):
    connect, plays = WAYS[way]

    async def agent(task, base_url, api_key):
        return await plays(connect(base_url, api_key), (OTHER,))

    result, seen, vision = play(agent, f"Let me see.{CALL}", "Answer: 85")
    (trajectory,) = result.trajectories
    assert len(trajectory.forks) == 1
    (place, _) = images_of(trajectory.forks[0])
    assert place.image == vision.see(Picture(png(OTHER)))
    assert [places[0].image for _, places in seen] == [
        vision.see(Picture(png(seed))) for seed in (FIRST, OTHER)
    ]


ADDRESS, BROKEN = "https://example.org/a.png", Picture(b"\x89PNG" + b"x" * 40).to_part()["image_url"]["url"]
BAD_CHAT = [
    (in_chat(FIRST) | {"image_url": {"url": ADDRESS}}, "nothing is downloaded"),
    ({"type": "image_url", "image_url": {"url": BROKEN}}, "no PNG, JPEG, WEBP file"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is not base64"),
    ({"type": "image_url", "image_url": {"url": uri(FIRST), "detail": "low"}}, "detail='low' is not accepted"),
    ({"type": "image_url", "image_url": {"url": uri(FIRST), "size": 3}}, r"\.size is not read"),
    ({"type": "input_audio", "input_audio": {"data": "x"}}, r"\.input_audio is not read"),
]  # fmt: skip
BAD_RESPONSES = [
    ({"type": "input_image", "image_url": ADDRESS, "detail": "auto"}, "nothing is downloaded"),
    ({"type": "input_image", "file_id": "file-1", "detail": "auto"}, r"\.file_id is not read"),
]
BAD_MESSAGES = [
    ({"type": "image", "source": {"type": "url", "url": ADDRESS}}, "nothing is downloaded"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, r"\.file_id is not read"),
]


def test_images_that_cannot_be_read_are_refused_by_name(play):
    async def agent(task, base_url, api_key):
        client, other = of_openai(base_url, api_key), of_anthropic(base_url, api_key)
        for part, problem in BAD_CHAT:
            with pytest.raises(later.openai.BadRequestError, match=problem):
                await client.chat.completions.create(model="policy", messages=[asking(part)])
        for part, problem in BAD_RESPONSES:
            with pytest.raises(later.openai.BadRequestError, match=problem):
                await client.responses.create(model="policy", input=[asking(part, "input_text")])
        for part, problem in BAD_MESSAGES:
            for content in ([part], [{"type": "tool_result", "tool_use_id": "a", "content": [part]}]):
                with pytest.raises(later.anthropic.BadRequestError, match=problem):
                    asked = [{"role": "user", "content": content}]
                    await other.messages.create(model="policy", max_tokens=9, messages=asked)
        said = [{"role": "assistant", "content": [in_chat(FIRST)]}, asking(in_chat(FIRST))]
        with pytest.raises(later.openai.BadRequestError, match="image_url is not read"):
            await client.chat.completions.create(model="policy", messages=said)
        many = [{"role": "user", "content": [in_chat(FIRST)] * 65}]
        with pytest.raises(later.openai.BadRequestError, match="more than 64 images"):
            await client.chat.completions.create(model="policy", messages=many)
        with pytest.raises(later.openai.BadRequestError, match="is not read"):
            await client.responses.create(model="policy", input="x", instructions=[in_responses(FIRST)])
        await client.chat.completions.create(model="policy", messages=[asking(in_chat(FIRST))])

    result, seen, _ = play(agent, "Answer: 85")
    assert result.failed[0].failure_class == "agent/refused" and len(seen) == 2  # the episode is played twice


def test_images_without_vision_are_refused_by_name(play):
    async def agent(task, base_url, api_key):
        client = of_openai(base_url, api_key)
        with pytest.raises(later.openai.BadRequestError, match=r"model\.vision=frozen"):
            await client.chat.completions.create(model="policy", messages=[asking(in_chat(FIRST))])
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "What is "}]
        )

    result, seen, _ = play(agent, "Answer: 85", sees=False)
    assert not result.failed and len(seen) == 1


async def plays_any(task, base_url, api_key):
    """Act as an agent of each SDK in turn; the image of the task is sent as it came."""
    (message,) = json.loads(json.dumps(task["messages"]))
    assert message["content"][1] == Picture(png(FIRST)).to_part()
    connect, plays = [*WAYS.values()][task["sample"]]
    return await plays(connect(base_url, api_key), (FIRST, 0))


@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_every_sdk_trains_with_images(vision_directories, tmp_path, monkeypatch, vision):  # noqa: F811
    monkeypatch.setitem(sys.modules, "agents_that_look", sys.modules[__name__])
    rows = [{"prompt": "What is <image>", "image": png(FIRST), "ground_truth": ""}]
    GRPOTrainer(
        str(vision_directories["qwen3_vl"]),
        rows,
        [Vowels()],
        env=AgentEnv,
        output={"dir": str(tmp_path)},
        rollout={"prompts": 1, "group_size": len(WAYS), "max_tokens": 8},
        mismatch={"stop_above": 1e-4},
        max_steps=2,
        **{"model.autocast": "none", "model.vision": vision, "env.agent": "agents_that_look:plays_any"},
    ).train()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["env/forks"] for row in metrics] == [0, 0] and all(row["grad_norm"] > 0 for row in metrics)
    assert all(row["mismatch/max"] < 1e-4 for row in metrics)
    assert all(row["env/trained_tokens"] == row["env/generated_tokens"] for row in metrics)
    told = [json.loads(line) for line in (tmp_path / "episodes/step-000002.jsonl").read_text().splitlines()]
    seen = [[image for span in one["spans"] for image in span.get("images", ())] for one in told]
    assert sorted(map(len, seen)) == [1, 2, 2, 2, 2]  # openai-agents ends after an answer without a call
    assert all((tmp_path / "images" / f"{digest}.png").is_file() for found in seen for digest, *_ in found)
