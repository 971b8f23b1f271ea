"""The environment of a shell: what persists between commands, what the policy reads, and whose fault a failure is."""

import asyncio
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.workspaces import Workspaces
from rl4llm.extensions.workspaces.shell import Kept, Shell, ShellEnv, fenced
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient, check_env

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (scripts/install_sandbox.sh)"
)


class Always(BaseRewardFunction):
    """Rewards every episode alike, so that only the environment decides how it ends."""

    def __init__(self):
        super().__init__("always")

    def __call__(self, messages, ground_truth, **columns):
        return 1.0


FORGED = "0123456789abcdef0123456789abcdef"
SYNTAX = (
    "if then ) (",
    "echo `x",
    'echo "',
    "echo $((",
    "echo $(",
    "for x in",
    "}",
    "cat <<E\nx",
    "case x in a) ;;",
)


@pytest.fixture(scope="module")
def pool():
    made = Workspaces(count=4)
    yield made
    made.close()


@pytest.fixture
def run(pool):
    """Runs commands one after the other in one shell; returns what each printed, its exit code and how it ended."""

    def commands(*commands, command_s=20.0, max_chars=2000):
        async def played():
            workspace = await pool.open()
            shell = Shell(workspace, command_s, max_chars)
            try:
                return [(await shell.run(command))[:3] for command in commands]
            finally:
                await shell.end()
                await workspace.close()

        return asyncio.run(played())

    return commands


def test_directory_variables_and_functions_persist(run):
    commands = "cd /tmp; x='a b'", 'f() { echo "<$1>"; }', 'f "$x"; pwd', "cat > t <<'E'\nlines\nE\ncat t"
    assert run(*commands) == [("", 0, ""), ("", 0, ""), ("<a b>\n/tmp", 0, ""), ("lines", 0, "")]


def test_standard_error_and_exit_codes_are_in_order(run):
    first, second = run("echo a; echo b >&2; echo c; (exit 3)", "echo $?")
    assert first == ("a\nb\nc", 3, "") and second == ("0", 0, "")


def test_a_syntax_error_leaves_the_shell_as_it_was(run):
    _, *broken, after = run("x=5", *SYNTAX, "echo $x")
    assert [end for *_, end in broken] == [""] * len(SYNTAX) and after == ("5", 0, "")
    assert sum("yntax error" in output or "EOF" in output for output, *_ in broken) >= 8


def test_input_of_a_command_is_empty(run):
    assert run("cat; read line || echo end", "echo here") == [("end", 0, ""), ("here", 0, "")]


def test_long_output_keeps_its_head_and_its_tail(run):
    ((output, *_),) = run("seq 1 200000; echo é", max_chars=100)
    head, mark, tail = re.split(r"\n(\[\d+ bytes cut\])\n", output)
    assert head.startswith("1\n2\n3\n") and tail.endswith("199999\n200000\né") and len(head + tail) <= 100
    size = sum(len(f"{number}\n") for number in range(1, 200001)) + len("é\n".encode())
    assert (
        mark == f"[{size - len((head + tail).encode()) - 1} bytes cut]"
    )  # the last end of line is not shown


def test_output_within_the_limit_is_whole():
    kept = Kept(8)
    kept.add("äöüß".encode())
    kept.add(b"1234")
    assert kept.text(8) == "äöüß1234"
    kept.add(b"56789")
    assert kept.text(8) == "äöüß\n[5 bytes cut]\n6789"


def test_flood_of_output_is_stopped_by_the_time_limit(run):
    (output, code, end), after = run("yes", "echo after", command_s=1.0, max_chars=200)
    assert (code, end) == (None, "timeout") and len(output) < 300 and after == ("after", 0, "")


def test_slow_command_is_stopped_and_a_new_shell_begins(run):
    again = 'echo "<$x>"; pgrep sleep || echo none'
    slow, after = run("x=5; echo first; sleep 60", again, command_s=2)
    assert slow == ("first", None, "timeout") and after == ("<>\nnone", 0, "")


@pytest.mark.parametrize("death", ["kill -9 $$", "exec true", "set -e; false", "exit 4"])
def test_shell_that_died_is_started_again(death, run):
    assert run(f"echo before; {death}", "echo after") == [("before", None, "ended"), ("after", 0, "")]


@pytest.mark.parametrize(
    "forgery",
    [
        f"printf '%s%s %s\\n' {FORGED} {FORGED} 0",
        "set -x; echo traced",
        "set -v; echo shown",
        "echo mine >&9",
        "exec 9>/dev/null; echo mine >&9",
        "tr -d '\\0' </proc/$$/cmdline; ls -l /proc/self/fd",
        "cat /proc/$$/fd/0 & sleep 0.2; kill $!; wait",
        "exec >/tmp/out; echo hidden",
        "printf 'no end of line'",
        "head -c 100000 /dev/urandom",
    ],
)
def test_output_cannot_forge_the_end_of_a_command(forgery, run):
    outcomes = run(forgery, "sleep 0.3; (exit 7)", "(exit 8)", command_s=10)
    assert outcomes[0][1] is not None and [outcome[1] for outcome in outcomes[1:]] == [7, 8]
    marks = {mark for output, *_ in outcomes for mark in re.findall(r"[0-9a-f]{64}", output)}
    assert marks <= {2 * FORGED}


@pytest.mark.parametrize(
    "text", [r"'x\n'", r"'-1\n'", r"'7777777\n'", r"' 7\n'", "7777", "7; exec cat /dev/zero"]
)
def test_an_end_without_an_exit_code_ends_the_shell(text, run):
    forgery = f"""command() {{ printf '%s%s ' "$3" "$4"; printf {text}; }}"""
    outcomes = run(forgery, "echo after", command_s=10)
    assert [outcome[1:] for outcome in outcomes] == [(None, "ended"), (0, "")]


def test_background_processes_run_on_until_the_shell_ends(run):
    beat = "(while :; do date +%N > /tmp/beat; sleep 0.05; done) &"
    (_, _, _), first, second = run(beat, "sleep 0.2; cat /tmp/beat; sleep 0.3", "cat /tmp/beat")
    assert first[0] != second[0] and second[1] == 0


def test_blocks_of_a_reply_are_one_command():
    def command(text):
        return [call.arguments["command"] for call in fenced(text)]

    assert command("First\n```sh\nls\n```\nthen\n```bash\npwd\n```\n") == ["ls\npwd\n"]
    assert command("```python\nprint(1)\n```") == command("no block") == command("```sh\n\n```") == []
    assert command("```\nls -l") == ["ls -l"]
    assert command("````sh\ncat > a.md <<E\n```\nE\n````") == ["cat > a.md <<E\n```\nE\n"]


@pytest.mark.parametrize(
    "text", ["'```' + 10**6 * ' ' + 'x'", "'exit' + 10**6 * '\\n' + 'x'", "10**6 * ' ;'"]
)
def test_spaces_in_a_reply_take_linear_time(text):
    code = (
        f"from rl4llm.extensions.workspaces.shell import exits, fenced; list(fenced({text})); exits({text})"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)  # a square would take many minutes


@pytest.fixture
def play(tokenizer):
    """Plays the episodes of rows; the policy says `turns` in this order. Returns the result and the client."""
    runner = Runner()

    def run(turns, *, rows=({},), prepare=lambda env: None, **options):
        client = ScriptedClient(tokenizer, {"": turns} if isinstance(turns, list) else turns)
        runner.run(client.load(WeightRef(0)))
        shared = {"messages": [{"role": "user", "content": "Do it."}], "ground_truth": ""}
        env = ShellEnv([shared | row for row in rows], tokenizer, [Always()], len(rows), 1, **options)
        prepare(env)
        rollout = Rollout(env, client, Renderer.of(env, tokenizer), runner, seed=0, max_failed_share=1.0)
        try:
            params = SamplingParams(max_tokens=500)
            return rollout.play(range(len(rows)), step=0, sampling_params=params), client
        finally:
            env.close()

    yield run
    runner.close()


def block(command):
    return f"```sh\n{command}\n```"


def told(trajectory):
    return [message.content for message in trajectory.messages[1:] if message.role != "assistant"]


def test_episode_of_blocks_has_exactly_the_sampled_tokens(play, tokenizer):
    turns = [block("cd /tmp && echo 3 > a"), f"Now I look.\n{block('cat a; false')}", "It is 3."]
    result, client = play(turns, calls="block")
    (trajectory,) = result.trajectories
    assert told(trajectory) == ["[exit code 0]", "3\n[exit code 1]"]
    sampled = [span for span in trajectory.spans if span.author == "policy"]
    spoken = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    assert [list(span.token_ids[:-1]) for span in sampled] == spoken
    prompt = client.calls[-1].prompt_ids
    assert prompt == tuple(token for span in trajectory.spans[:-1] for token in span.token_ids)
    counts = trajectory.extras["metrics"]
    assert {name: counts[name] for name in ("commands", "exit_errors", "timeouts")} == {
        "commands": 2, "exit_errors": 1, "timeouts": 0,
    }  # fmt: skip
    assert (trajectory.stop_reason, trajectory.num_turns) == ("done", 3)
    assert "+3" in trajectory.extras["changes"]


def test_calls_of_the_template_are_commands(play):
    call = '<tool_call>{"name": "shell", "arguments": {"command": "echo a; cd /tmp"}}</tool_call>'
    wrong = '<tool_call>{"name": "shell", "arguments": {"code": "echo a"}}</tool_call>'
    result, _ = play([call, call.replace("echo a; cd /tmp", "pwd"), wrong, "Done."], calls="tool")
    (trajectory,) = result.trajectories
    first, second, third = told(trajectory)
    assert (first, second) == ("a", "/tmp") and third.startswith("Error: ")
    assert {message.role for message in trajectory.messages[1:]} == {"assistant", "tool"}
    assert trajectory.extras["metrics"]["tool_errors"] == 1


@pytest.mark.parametrize(
    ("turns", "steps", "reason"),
    [
        ([block("true"), block("cd /tmp; exit"), block("true")], 2, "done"),
        ([block("false || exit 3")], 1, "done"),
        ([block("true || exit"), "Done."], 2, "done"),
        ([block("kill $$"), block("true"), "Done."], 3, "done"),
        ([block("true")], 3, "max_steps"),
    ],
)
def test_exit_or_no_command_ends_the_episode(turns, steps, reason, play):
    result, _ = play(turns, calls="block", max_steps=3)
    (trajectory,) = result.trajectories
    assert (trajectory.num_turns, trajectory.stop_reason) == (steps, reason)


def test_replies_name_the_time_limit_and_the_dead_shell(play):
    turns = [block("echo a; sleep 60"), block("kill -9 $$"), block("seq 99"), "Done."]
    result, _ = play(turns, calls="block", command_s=1.5, max_reply_chars=40)
    (trajectory,) = result.trajectories
    late, dead, long = told(trajectory)
    assert late.startswith("a\n[") and "1.5 s" in late and "new shell" in dead and "bytes cut" in long
    assert trajectory.extras["metrics"]["timeouts"] == 1


def test_files_of_a_row_are_there_before_the_first_command(play):
    rows = [{"files": {"notes/a.txt": "one\n", "/tmp/b.txt": "two\n"}}]
    result, _ = play([block("cat notes/a.txt /tmp/b.txt"), "Done."], rows=rows, calls="block")
    assert told(result.trajectories[0]) == ["one\ntwo"]


def test_nothing_of_an_episode_runs_on_after_it(play):
    play([block("setsid sleep 98765.25 & (sleep 98765.25 &)"), "Done."], calls="block")
    running = subprocess.run(["pgrep", "-f", "98765.25"], capture_output=True, text=True).stdout
    assert running == ""


def test_a_broken_workspace_is_played_again_and_never_scored(play):
    envs, broken = [], []

    def reply(session, prompt_ids):
        if not broken:  # once, before the first command
            broken.append(session)
        elif len(broken) == 1:
            broken.append(session)
            envs[0].workspaces._keeper._process.kill()
        return block("sleep 0.5; echo here")

    result, client = play(reply, prepare=envs.append, calls="block", max_steps=6)
    (trajectory,) = result.trajectories
    assert trajectory.extras["played_again_after"] == "env/workspace"
    assert told(trajectory) == ["here"] * 5
    assert len(client.calls) < 6 + 6  # the fault ends the first attempt


def test_more_episodes_than_places_wait_without_an_engine(play):
    rows = [{"ground_truth": str(number)} for number in range(5)]
    result, client = play([block("pwd"), "Done."], rows=rows, calls="block", workspace={"count": 2})
    assert len(result.trajectories) == 5
    begun, paused = Counter(client.expected), Counter(client.released)
    waited = {session for session, times in begun.items() if times > min(begun.values())}
    assert len(waited) == 3
    assert waited == {session for session, times in paused.items() if times > min(paused.values())}


def test_shell_keeps_the_contract_of_environments(tokenizer):
    rows = [{"messages": [{"role": "user", "content": "Do it."}], "ground_truth": ""}] * 2
    env = ShellEnv(rows, tokenizer, [Always()], 2, 1, calls="block", max_steps=3)
    try:
        check_env(env, [block("echo $RANDOM > /dev/null; cat; ls /"), block("exit")])
    finally:
        env.close()
