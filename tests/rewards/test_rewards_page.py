"""The page about rewards names every reward, and its code runs."""

import re
from pathlib import Path

import yaml

from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.extensions.inspect.info.inventory import first_sentence
from rl4llm.rewards import REWARDS, as_reward_function, check_examples, score, weighted_sum

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def test_the_table_has_every_reward_with_its_first_sentence():
    ours = [name for name in REWARDS if REWARDS[name].__module__.startswith("rl4llm.")]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(name, first_sentence(REWARDS, name)) for name in ours]


def test_the_rewards_of_its_code_hold_and_score(monkeypatch):
    monkeypatch.setattr(REWARDS, "_items", dict(REWARDS._items))  # what the page registers is gone afterwards
    scope = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], scope)
    rewards = [as_reward_function(reward) for reward in scope["rewards"]]
    check_examples(rewards)
    said = [ChatMessage("user", "Yes?"), ChatMessage("assistant", "A coffee, please?")]
    sample = SampleState("p", 0, said, "", init_msg_size=1)
    scores = score([sample], rewards, weighted_sum({"polite": 1.0, "short": 0.5}))
    assert scores.reward.tolist() == [1.5] and sample.turn_rewards == {0: 0.1}


def test_its_configuration_can_be_built():
    items = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])["rewards"]
    built = [
        as_reward_function({key: value for key, value in item.items() if key != "weight"})
        for item in items
        if ":" not in item["name"]
    ]
    assert [reward.name for reward in built] == ["math", "format", "length", "tool_use"]
