import pytest

from rl4llm.config import flatten, load_config
from rl4llm.tracking.redact import redacted

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_keys_are_hidden_wherever_they_stand_and_ordinary_options_are_not():
    config = {
        "rollout": {"max_tokens": 8, "stop_token_ids": [1], "pad_token": "<pad>", "prompt_key": "question"},
        "rewards": [{"name": "judge", "api_key": KEY, "headers": {"Authorization": f"Basic {KEY}"}}, "math"],
        "wandb.api_key": KEY,
        "HF_TOKEN": KEY,
        "data": {"path": f"https://me:{KEY}@example.org/data"},
        "lr": 0.1,
    }
    shown = redacted(config)
    assert KEY not in str(shown)
    assert shown["rollout"] == config["rollout"]
    assert shown["rewards"][1] == "math" and shown["lr"] == 0.1
    assert shown["data"]["path"] == "https://(hidden)@example.org/data"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"server --api-key={KEY} --port=1", "server --api-key=(hidden) --port=1"),
        (f"https://host/v1?token={KEY}&limit=3", "https://host/v1?token=(hidden)&limit=3"),
        (f"curl -H 'Authorization: Bearer {KEY}'", "curl -H 'Authorization: Bearer (hidden)'"),
        (f"ask sk-{KEY} twice", "ask (hidden) twice"),
        ("https://host/v1/models", "https://host/v1/models"),
        ("monkey=3, a risk-averse-policy-of-many-words", "monkey=3, a risk-averse-policy-of-many-words"),
    ],
)
def test_a_key_inside_a_text_is_hidden_and_the_rest_of_the_text_stays(text, shown):
    assert redacted([text]) == [shown]


def test_the_variables_of_a_command_are_hidden_also_where_keys_are_dotted_afterwards():
    program = {"env.name": "agent", "env.command": "solve", "env.env": {"SEARCH": KEY}}
    config = load_config(overrides={"model.path": "m", "data.path": "d", **program})
    assert KEY in str(flatten(config))
    assert KEY not in str(flatten(redacted(config)))
