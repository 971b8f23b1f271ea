"""What tests share: a small model and tokenizer, built once, of which each test takes a copy; a full disk."""

import copy
import os
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from rank_processes import RankProcesses

from rl4llm.inference.launch import launch
from rl4llm.quickstart.model import build_model, build_tokenizer

TEXTS = [
    "system\nBe brief.\n",
    "user\nHow many coins are 37 and 48?\nassistant\nAnswer: 85\n",
    'assistant\n<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>\ntool\n85\n',
]


LONGEST = (
    "test_rank_kills", "test_nodes", "test_sglang", "test_vllm", "test_cli", "test_router", "test_examples",
    "test_launchers", "test_training", "test_launch_ranks", "test_quickstart", "test_ranks", "test_remote_training",
    "test_abuse",
)  # fmt: skip


def pytest_configure():
    """Ctrl-C is Ctrl-C also where a shell started the tests in the background, and has all that they start ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """The files that take longest begin, so that several processes, of which each runs whole files, end together."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(TEXTS * 4, vocab_size=320)


@pytest.fixture(scope="session")
def _model(tokenizer):
    return build_model(tokenizer, seed=0, hidden_size=64, num_layers=2).eval()


@pytest.fixture
def model(_model):
    return copy.deepcopy(_model)


@pytest.fixture(scope="session")
def model_dir(_model, tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    _model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _python_of(engine):
    """The Python of a real server's environment; without one, the test is skipped with the reason."""
    variable = f"RL4LLM_{engine.upper()}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name the Python of an environment with {engine}; scripts/test.sh makes one")
    return os.environ[variable]


@pytest.fixture(scope="module")
def sglang_url(model_dir):
    """A real SGLang server with the small model, for the tests of one file: it keeps a core busy also when it idles."""
    adapters = ["--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all"]
    flags = ["--model-path", str(model_dir), "--port", "0", *adapters]
    with launch("sglang", flags, python=_python_of("sglang"), cpu=True, ready_within_s=300) as server:
        yield server.url


@pytest.fixture(scope="module")
def on_ranks():
    """on_ranks(function, *args): what `function(ranks, *args)` returns on each of two processes that train together."""
    with RankProcesses(size=2) as processes:
        yield processes


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture
def files_of_at_most():
    """A full disk: inside `with files_of_at_most(size)` the kernel refuses to let any file grow beyond `size` bytes."""

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
