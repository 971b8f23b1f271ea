"""Training in a notebook: a real kernel runs cells inside its event loop, and what cells define is used."""

import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
CELL_S = 300.0
KEYS = 'rollout={{"prompts": 2, "group_size": 2, "max_tokens": 4}}, output={{"dir": "{0}"}}'
CELLS = '''
from rl4llm import BaseMDPEnv, BaseRewardFunction, ChatMessage

class Again(BaseMDPEnv):
    async def respond(self, sample):
        return [ChatMessage("user", "Again.")]

class Short(BaseRewardFunction):
    def __call__(self, messages, ground_truth, **kwargs):
        return -float(len(messages[-1].content))

def search(query: str) -> str:
    """Search a text.

    Args:
        query: what to look for.
    """
    return "nothing"

async def train(**keys):
    trainer = GRPOTrainer(model=MODEL, dataset=rows, reward_functions=[Short("short")], **keys)
    return trainer.train().trainer.step
'''


class Kernel:
    """Runs cells one after the other."""

    def __init__(self, manager, client):
        self._manager, self._client = manager, client

    def run(self, code, interrupt_at=None):
        """Return what a cell printed or displayed, as text; interrupt it once when that contains `interrupt_at`.

        `shown` has the type and content of the messages that displayed something.
        """
        self.shown = []
        cell, said, end = self._client.execute(code), "", time.monotonic() + CELL_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if "data" in content:
                self.shown.append((message["msg_type"], content))
            said += content.get("text", "") + "\n".join(content.get("traceback", ()))
            said += content.get("data", {}).get("text/plain", "")
            if interrupt_at and interrupt_at in said:
                interrupt_at = None
                self._manager.interrupt_kernel()
            if content.get("execution_state") == "idle":
                return said


@contextmanager
def started(python, directory):
    """Yield a kernel of this Python in a directory."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = python
    manager.start_kernel(cwd=str(directory))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=CELL_S)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(model_dir, warm_python, tmp_path_factory):
    with started(warm_python, tmp_path_factory.mktemp("notebook")) as kernel:
        prepare(kernel, model_dir)
        yield kernel


def prepare(kernel, model_dir):
    """Run the snippet of the README, and the cells that define what the tests use."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    snippet = next(block for block in blocks if "GRPOTrainer(" in block)
    snippet = snippet.replace("path/to/model", str(model_dir)).replace(
        "max_steps=10", f"max_steps=2, {KEYS.format('readme')}"
    )
    kernel.readme = kernel.run(snippet)
    assert not kernel.run(f"MODEL = {str(model_dir)!r}\n{CELLS}")


def test_the_snippet_of_the_readme_trains(kernel):
    assert "step 2/2" in kernel.readme


@pytest.mark.parametrize(
    ("env", "where"), [("Again", "class"), ('{"name": "tool", "tools": [search]}', "tool")]
)
def test_what_cells_define_trains(kernel, env, where):
    said = kernel.run(f"print('steps', await train(env={env}, max_steps=2, {KEYS.format(where)}))")
    assert "steps 2" in said, said


def test_a_run_is_one_picture_that_grows(kernel):
    kernel.run(
        "from rl4llm.extensions.view import notebook\nusual, notebook.REFRESH_S = notebook.REFRESH_S, 0.1"
    )
    keys = KEYS.format("grows")
    kernel.run(
        f"trainer = GRPOTrainer(model=MODEL, dataset=rows, reward_functions=[Short('short')], max_steps=25, {keys})"
    )
    said = kernel.run("trainer.train();")  # not the cell that made it
    shown = kernel.shown
    kernel.run("notebook.REFRESH_S = usual")
    assert [kind for kind, _ in shown] == ["display_data"] + ["update_display_data"] * (len(shown) - 1)
    assert len({content["transient"]["display_id"] for _, content in shown}) == 1
    assert "phase:" not in said and "prompts per rollout" not in said
    pages = [content["data"]["text/html"] for _, content in shown]
    assert "<img" not in pages[0] and len({page.partition("<img")[2] for page in pages}) > 3
    assert "step 25/25 \u00b7 finished" in pages[-1]
    # a resumed run begins with its earlier curve
    kernel.run(f"done = await train(max_steps=27, {keys})")
    pages = [content["data"]["text/html"] for _, content in kernel.shown]
    assert "step 25/27 \u00b7 starting" in pages[0] and "<img" in pages[0] and "step 27/27" in pages[-1]


def test_plain_output_in_a_notebook_has_lines(kernel):
    keys = KEYS.format("plain").replace('{"dir"', '{"console": "plain", "dir"')
    said = kernel.run(f"done = await train(max_steps=2, {keys})")
    assert "phase: rollout" in said and "step 2/2" in said and not kernel.shown


def test_a_finished_run_is_a_table_and_a_page(kernel):
    kernel.run(
        "trainer = GRPOTrainer(model=MODEL, dataset=rows, reward_functions=[Short('short')], max_steps=12, "
        f"{KEYS.format('table')}).train()"
    )
    assert "GRPOTrainer('table', step 12 of 12)" in kernel.run("trainer")
    table = kernel.run("trainer.history")
    ((kind, content),) = kernel.shown
    assert kind == "execute_result" and content["data"]["text/html"].count("<tr>") == 1 + 3 + 1 + 5
    assert "12 rows" in table and len(table.splitlines()) == 11 and "reward/mean" in table
    frame = "import pandas\nframe = pandas.DataFrame(trainer.history)\n"
    said = kernel.run(f"{frame}print(list(frame.step) == list(range(1, 13)), 'grad_norm' in frame)")
    assert said.strip() == "True True"
    assert "rl4llm view table" in kernel.run("trainer.view()")
    page = kernel.shown[0][1]["data"]["text/html"]
    assert (
        page.startswith('<iframe sandbox="allow-scripts allow-downloads" srcdoc="&lt;!doctype html')
        and "</" not in page[:-9]
    )


CELL_TWICE = """
@register_reward("redefined")
class Redefined(BaseRewardFunction):
    def __init__(self, name="redefined"):
        super().__init__(name)
    def __call__(self, messages, ground_truth, **kwargs):
        return {value}
"""


def test_a_cell_that_registers_a_name_can_run_again(kernel):
    kernel.run("from rl4llm import register_reward")
    for value in (1.0, 2.0):
        assert not kernel.run(CELL_TWICE.format(value=value))
    keys = KEYS.format("twice")
    said = kernel.run(
        f"trainer = GRPOTrainer(model=MODEL, dataset=rows, reward_functions=['redefined'], max_steps=1, {keys})\n"
        "print(trainer.train().history[0]['reward/mean'])"
    )
    assert said.strip().endswith("2.0"), said
    assert "already registered" in kernel.run(
        CELL_TWICE.format(value=3.0).replace("class Redefined", "class Other")
    )


def test_an_error_of_a_cell_names_the_cell(kernel):
    kernel.run("def broken(completions, **columns):\n    return {}['nothing']")
    number = int(kernel.run("print(len(In) - 2)"))
    keys = KEYS.format("broken")
    said = kernel.run(
        f"GRPOTrainer(model=MODEL, dataset=rows, reward_functions=[broken], max_steps=1, {keys}).train()"
    )
    assert f"raised KeyError: 'nothing' (In[{number}]:2)" in said, said


def test_an_interrupted_cell_leaves_a_run_that_resumes(kernel):
    said = kernel.run(
        f"done = await train(max_steps=10_000, {KEYS.format('long')})\nprint('steps', done)", "reward "
    )
    assert "SIGINT: finishing step" in said and 0 < int(said.rpartition("steps ")[2]) < 10_000, said
    said = kernel.run(f"print('steps', await train(max_steps=done + 1, {KEYS.format('long')}) - done)")
    assert "steps 1" in said and "step 1/" not in said, said
