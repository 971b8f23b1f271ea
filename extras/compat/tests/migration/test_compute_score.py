"""Reward functions of verl work unchanged."""

import pytest

from rl4llm import ChatMessage
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError
from rl4llm.rewards import as_reward_function, score

MESSAGES = [ChatMessage("system", "Add."), ChatMessage("user", "1+1?"), ChatMessage("assistant", "It is 2.")]


VERL = """
import asyncio

meeting = asyncio.Barrier(2)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["index"] == 3
    return {"score": float(solution_str.endswith(ground_truth + ".")), "acc": 1}

def plain(solution_str, ground_truth, **kwargs):
    return 0.5

async def later(data_source, solution_str, ground_truth, extra_info=None):
    both = await asyncio.wait_for(meeting.wait(), 20)  # until both episodes are being scored
    return {"score": float(solution_str.endswith(ground_truth + "."))}

async def breaks(solution_str, **kwargs):
    raise KeyError("later")

def sometimes(solution_str, **kwargs):
    return later("", solution_str, "2") if "2" in solution_str else 0.25

def batch(data_sources, solution_strs, ground_truths):
    return [1.0]
"""


def test_function_of_verl_scores_unchanged(tmp_path):
    (tmp_path / "score.py").write_text(VERL)
    options = {"name": "compute_score", "path": str(tmp_path / "score.py")}
    reward = as_reward_function(options)
    columns = {"data_source": "gsm8k", "extra_info": {"index": 3}}
    assert reward(MESSAGES, "2", **columns) == 1.0
    assert reward(MESSAGES, "3", **columns) == 0.0
    assert as_reward_function(options | {"function": "plain"})(MESSAGES, "2", **columns) == 0.5


def test_async_function_of_verl_scores_all_episodes_at_once(tmp_path):
    (tmp_path / "score.py").write_text(VERL)
    options = {"name": "compute_score", "path": str(tmp_path / "score.py")}

    def scored(function, *said):
        samples = [
            SampleState("p", 0, [ChatMessage("assistant", text)], "2", init_msg_size=0) for text in said
        ]
        found = score(samples, [as_reward_function(options | {"function": function})]).reward
        return found.tolist(), [sample.failure_class for sample in samples]

    assert scored("later", "It is 2.", "It is 3.") == ([1.0, 0.0], ["", ""])
    assert scored("sometimes", "It is 2.", "5", "It is not 2.") == ([1.0, 0.25, 1.0], [""] * 3)
    assert scored("breaks", "2")[1] == ["compute_score/raised"]


@pytest.mark.parametrize(("change", "message"), [
    ({"path": "absent.py"}, "is not a Python file"),
    ({"function": "absent"}, "has no function 'absent'"),
    ({"function": "batch"}, "scores a batch"),
])  # fmt: skip
def test_function_that_cannot_score_is_refused(tmp_path, change, message):
    (tmp_path / "score.py").write_text(VERL)
    options = {"name": "compute_score", "path": str(tmp_path / "score.py")} | change
    with pytest.raises(ConfigError, match=message):
        as_reward_function(options)
