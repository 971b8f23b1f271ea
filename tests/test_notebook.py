"""Training in a notebook: a real kernel runs cells inside its event loop, and what cells define is used."""

import re
import time
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
CELL_S = 300.0
KEYS = 'rollout={{"prompts": 2, "group_size": 2, "max_tokens": 4}}, output={{"dir": "{0}"}}'
CELLS = '''
from rl4llm import BaseMDPEnv, ChatMessage

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
        """Return what a cell printed; interrupt it once when it prints `interrupt_at`."""
        cell, said, end = self._client.execute(code), "", time.monotonic() + CELL_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            said += content.get("text", "") + "\n".join(content.get("traceback", ()))
            if interrupt_at and interrupt_at in said:
                interrupt_at = None
                self._manager.interrupt_kernel()
            if content.get("execution_state") == "idle":
                return said


@pytest.fixture(scope="module")
def kernel(model_dir, tmp_path_factory):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(tmp_path_factory.mktemp("notebook")), startup_timeout=CELL_S
    )
    kernel = Kernel(manager, client)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    snippet = next(block for block in blocks if "GRPOTrainer(" in block)
    snippet = snippet.replace("path/to/model", str(model_dir)).replace(
        "max_steps=10", f"max_steps=2, {KEYS.format('readme')}"
    )
    kernel.readme = kernel.run(snippet)
    assert not kernel.run(f"MODEL = {str(model_dir)!r}\n{CELLS}")
    yield kernel
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_the_snippet_of_the_readme_trains(kernel):
    assert "step 2/2" in kernel.readme


@pytest.mark.parametrize(
    ("env", "where"), [("Again", "class"), ('{"name": "tool", "tools": [search]}', "tool")]
)
def test_what_cells_define_trains(kernel, env, where):
    said = kernel.run(f"print('steps', await train(env={env}, max_steps=2, {KEYS.format(where)}))")
    assert "steps 2" in said, said


def test_an_interrupted_cell_leaves_a_run_that_resumes(kernel):
    said = kernel.run(
        f"done = await train(max_steps=10_000, {KEYS.format('long')})\nprint('steps', done)", "step 1/"
    )
    assert "SIGINT: finishing step" in said and 0 < int(said.rpartition("steps ")[2]) < 10_000, said
    said = kernel.run(f"print('steps', await train(max_steps=done + 1, {KEYS.format('long')}) - done)")
    assert "steps 1" in said and "step 1/" not in said, said
