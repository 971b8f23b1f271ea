import time
import traceback

import pytest

from rl4llm.config import flatten, load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import redacted, redacted_text

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_secret_keys_are_hidden_and_ordinary_options_are_not():
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
def test_a_key_inside_a_string_is_hidden_and_the_rest_stays(text, shown):
    assert redacted([text]) == [shown]


def test_a_commands_variables_are_hidden_in_dotted_keys_too():
    program = {"env.name": "agent", "env.command": "solve", "env.env": {"SEARCH": KEY}}
    config = load_config(overrides={"model.path": "m", "data.path": "d", **program})
    assert KEY in str(flatten(config.values()))
    assert KEY not in str(flatten(config.stored()))


HIDES = [
    *(
        {name: KEY}
        for name in ("api_key", "apikey", "apiKey", "openai_api_key", "secretKey", "client_secret", "api-key")
    ),
    *(
        {name: KEY}
        for name in ("X-Api-Key", "github_token", "session_token", "pwd", "passphrase", "Authorization")
    ),
    {"signature_key": KEY},
    {"url": f"http://u:{KEY}@host"},
    {"url": f"http://u:{KEY}@more@host/v1"},
    {"url": f"http://host/?access_token={KEY}&n=1"},
    {"note": f"WANDB_API_KEY={KEY} python train.py"},
    {"error": f"{{'name': 'x', 'api_key': '{KEY}'}} is not accepted"},
    {"command": ["srv"], "env": {"ANY": KEY}},
    {"server_flags": ["--api-key", KEY]},
    {"command": ["srv", "--token", KEY]},
    {"command": ["srv", f"--token={KEY}"]},
    {"note": f"srv --auth-token {KEY}"},
    *({"note": f"{form}{KEY}"} for form in ("sk-proj-", "sk-ant-", "github_pat_", "nvapi-", "hf_", "gsk_")),
    {"note": f"AKIA{KEY[:16].upper()}"},
    {"note": f"eyJhbGciOiJIUzI1NiJ9.{KEY}.{KEY}"},
    {"note": f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----"},
]


@pytest.mark.parametrize("config", HIDES, ids=str)
def test_a_secret_of_any_common_form_is_hidden(config):
    assert KEY[:16].upper() not in str(redacted(config)).upper()


@pytest.mark.parametrize(
    "name",
    [
        "api_key_env",
        "token_file",
        "pad_token",
        "eos_token",
        "max_tokens",
        "stop_token_ids",
        "every_token",
        "answer_key",
    ],
)
def test_an_ordinary_key_with_such_a_word_is_shown(name):
    assert redacted({name: "a value"}) == {name: "a value"}


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": "${oc.env:OWN}"},
        {"api_key": "${oc.env:OWN,null}"},
        {"api_key": None, "token": "", "secret": False},
        {"url": "http://me:${oc.env:OWN}@host/v1?token=${oc.env:OWN}"},
        {
            "command": ["srv", "--token", "${oc.env:OWN}", "--key", "--port"],
            "env": {"TOKEN": "${judge.api_key}"},
        },
        {
            "note": "Next: export RL4LLM_SERVER_KEY=$(openssl rand -hex 32), or add --api-key KEY. Accepted: KEY=VALUE."
        },
        {
            "note": "sorted(names, key=len): the token: is long, pad_token=<pad>, --max-token 5, a secret is kept"
        },
    ],
    ids=str,
)
def test_a_reference_and_ordinary_words_stay(config):
    assert redacted(config) == config


def test_an_error_hides_the_secrets_that_it_quotes():
    given = {"name": "judge", "api_key": "own-5ecret"}
    error = ConfigError(f"rewards: {given!r} is not accepted: http://me:own-5ecret@host/v1 did not answer.")
    assert "5ecret" not in f"{error} {traceback.format_exception(error)}" and "'name': 'judge'" in str(error)


def test_a_reference_with_a_default_hides_the_default():
    assert KEY not in str(
        redacted({"api_key": f"${{oc.env:OWN,{KEY}}}", "note": f"--token ${{oc.env:OWN,{KEY}}}"})
    )


@pytest.mark.parametrize("text", ["eyJ-", "key=${", "--key ", "://a@", "bearer "])
def test_time_of_redaction_grows_with_the_length(text):
    started = time.process_time()
    redacted_text(text * (400_000 // len(text)))
    assert time.process_time() - started < 10
