"""Tools and template variables of a row are in the prompts of its episodes, and reach its rewards."""

import copy

import pytest

from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.core.errors import DataError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.load import load_rows
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient

SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
ROWS = [
    {"prompt": "Paris?", "tools": [SCHEMA["function"]]},
    {"prompt": "Paris?"},
    {"prompt": "Paris?", "chat_template_kwargs": {"silent": True}},
]


class SeesTools(BaseRewardFunction):
    """The number of tools in the row."""

    needs_ground_truth = False

    def __init__(self, name="sees_tools"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, tools=None, **columns):
        return float(len(tools or ()))


class Two(BaseMDPEnv):
    def respond(self, sample):
        return [ChatMessage("user", "Sure?")]


@pytest.fixture
def silent(tokenizer):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template += (
        "{%- if add_generation_prompt and silent %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    return changed


@pytest.fixture
def play(silent):
    runner = Runner()

    def run(rows, **options):
        client = ScriptedClient(silent, {"": ["18C", "Yes"]})
        runner.run(client.load(WeightRef(0)))
        env = Two(load_rows(rows), silent, [SeesTools()], 1, 2, max_steps=2, **options)
        rollout = Rollout(env, client, runner=runner, seed=0)
        result = rollout.play(range(len(rows)), step=0, sampling_params=SamplingParams(max_tokens=50))
        return client, result

    yield run
    runner.close()


def test_each_prompt_shows_what_its_row_says(play, silent):
    client, result = play(ROWS)
    assert len(result.groups) == 3
    for group, row in zip(result.groups, ROWS, strict=True):
        tools, args = [SCHEMA] if "tools" in row else None, row.get("chat_template_kwargs")
        own = Renderer(silent, tools, ("user",), args)
        asked, said = [ChatMessage("user", "Paris?")], ChatMessage("assistant", "18C")
        for trajectory in group.trajectories:
            first, _, second, _ = trajectory.spans
            assert list(first.token_ids) == own.first(asked)
            new = [ChatMessage("user", "Sure?")]
            assert list(second.token_ids) == own.following(new, ended=True, messages=[*asked, said])
            assert trajectory.reward == float("tools" in row)
    texts = [silent.decode(call.prompt_ids) for call in client.calls]
    assert sum("weather" in text for text in texts) == 4  # two samples of two turns
    assert sum(text.endswith("</think>\n\n") for text in texts) == 4


def test_tools_of_row_and_environment_are_not_mixed(play, silent):
    other = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
    client, _ = play(ROWS[1:], tool_schemas=[other])
    assert all("calculator" in silent.decode(call.prompt_ids) for call in client.calls)
    with pytest.raises(DataError):
        play(ROWS, tool_schemas=[other])
