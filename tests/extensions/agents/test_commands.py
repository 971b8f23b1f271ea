"""How a command becomes an agent: its directory, its files, and where its task is."""

import json
import os
import sys
from pathlib import Path

import pytest

from rl4llm.compose.environments import check_env_options
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.extensions.agents.runs import CommandAgent

AGENT = """
import json, os, sys, urllib.request
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "any-name", "messages": [{"role": "user", "content": "Hi"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, head)).read()
"""
TELLS = 'print(json.dumps([sys.argv[1:], sys.stdin.read(), os.environ["HOME"]]))'
CONFIGS = Path(__file__).parents[3] / "configs"
PROMPT = "--x \"two words\" $HOME 'q' {key}\n\\"


@pytest.fixture
def program(tmp_path):
    """A command that asks the policy once, and then runs these lines."""

    def write(lines):
        (tmp_path / "agent.py").write_text(AGENT + lines)
        return [sys.executable, str(tmp_path / "agent.py")]

    return write


def printed(result):
    assert not result.failed
    return [trajectory.messages[-1].content for trajectory in result.trajectories]


def test_a_prompt_is_one_argument_whatever_is_in_it(play, program):
    asked = {
        "messages": [
            {"role": "user", "content": "no"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": PROMPT},
        ]
    }
    command = [*program(TELLS), "{prompt}", "--of={prompt}", "{other}"]
    (text,) = printed(play(command=command, columns=asked)[0])
    words, typed, _ = json.loads(text)
    assert words == [PROMPT, f"--of={PROMPT}", "{other}"] and typed == ""


def test_a_command_without_a_prompt_reads_its_task(play, program):
    (text,) = printed(play(command=program(TELLS))[0])
    words, typed, _ = json.loads(text)
    assert words == [] and json.loads(typed)["messages"] == [{"role": "user", "content": "How many?"}]


def test_each_episode_has_a_directory_that_ends_with_it(play, program):
    lines = """
os.makedirs("made/here")
assert os.environ["HOME"] == os.getcwd() and os.stat(".").st_mode & 0o077 == 0
os.chmod("made", 0)
print(os.getcwd())
"""
    places = printed(play(command=program(lines), size=3)[0])
    assert len(set(places)) == 3 and not any(map(os.path.exists, places))


def test_files_and_variables_have_the_address_and_the_prompt(play, program):
    lines = """
address = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert open(".settings/my.json").read() == '{"at": "%s", "key": "%s"}' % address
assert os.environ["AT"] == address[0] + "?key=" + address[1]
print(open("prompt").read() + sys.stdin.read())
"""
    files = {".settings/my.json": '{"at": "{base_url}", "key": "{key}"}', "prompt": "{prompt}"}
    columns = {"messages": [{"role": "user", "content": PROMPT}]}
    env = {"AT": "{base_url}?key={key}"}
    result, _ = play(command=program(lines), files=files, env=env, columns=columns)
    assert printed(result) == [PROMPT.strip()]


def test_a_row_without_a_user_message_fails_not_the_run(play, program):
    columns = {"messages": [{"role": "system", "content": "Be brief."}]}
    result, client = play(command=[*program(""), "{prompt}"], columns=columns)
    assert [failed.failure_class for failed in result.failed] == ["env/task"] and not client.calls


def test_files_beside_the_trainer_are_found(play, program, tmp_path, monkeypatch):
    program(TELLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "modules")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "beside.py").write_text("WORD = 'there'")
    (tmp_path / "agent.py").write_text(AGENT + "import beside; print(beside.WORD)")
    assert printed(play(command=f"{sys.executable} agent.py")[0]) == ["there"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../above", "a/../../b"])
def test_no_file_is_written_outside_of_the_directory(path):
    CommandAgent("true", files={"..a/b..": "x"})
    with pytest.raises(ConfigError):
        CommandAgent("true", files={path: "x"})


@pytest.mark.parametrize("file", sorted((CONFIGS / "agents").glob("*.yaml")), ids=lambda file: file.stem)
def test_each_configuration_of_an_agent_is_accepted(file):
    config = load_config(CONFIGS / "agent_grpo.yaml", [str(file)])
    check_env_options(AgentEnv, config.env)
    texts = [*config.env["command"], *config.env.get("files", {}).values()]
    assert sum("{prompt}" in text for text in texts) == 1
