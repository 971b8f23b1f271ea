"""What tests share: a small model and tokenizer, built once and copied for each test; a full disk.

Fixtures import torch themselves: the process that hands files of tests to others starts in a second without.
"""

import copy
import gc
import os
import resource
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path

if os.path.exists("/dev/nvidiactl"):
    # all tests run on a CPU; scripts/bench/gpu.py checks a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import forked_python
import pytest

gc.disable()  # until all tests are collected: half a million objects of their imports stay

TEXTS = [
    "system\nBe brief.\n",
    "user\nHow many coins are 37 and 48?\nassistant\nAnswer: 85\n",
    'assistant\n<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>\ntool\n85\n',
]


LONGEST = (
    "test_tutorial", "extensions/servers/test_sglang", "trainers/test_ranks", "test_docs_commands", "test_real_model",
    "extensions/servers/test_sglang_images", "trainers/test_training", "extensions/servers/test_vllm",
    "extensions/launch/test_nodes", "extras/tinker/tests/test_sdk", "extensions/deepspeed/test_deepspeed",
    "extensions/remote/test_remote", "trainers/test_preferences", "extensions/quickstart/test_quickstart",
    "backends/test_sharded", "trainers/test_rank_kills", "inference/test_local", "test_pretended_gpu",
    "extensions/agents/test_agent_env", "extensions/adapters/test_verifiers", "inference/test_families", "test_cli",
    "extensions/recipes/test_recipes", "extensions/launch/test_launch_on", "test_build", "test_examples",
    "extensions/servers/test_launch", "extensions/servers/test_fleet", "trainers/test_image_training",
    "extensions/sandbox/test_abuse", "extensions/launch/test_launch_ranks", "extensions/servers/test_vllm_images",
    "extensions/inspect/plan/test_plan_images", "backends/test_tower",
    "rewards/test_verifier_pool", "extensions/servers/test_router", "extras/compat/tests/trl/test_script",
    "trainers/test_staleness", "trainers/test_mixture", "extensions/inspect/plan/test_plan",
    "extensions/servers/test_moe", "extensions/inspect/check/test_check", "extensions/view/test_page",
    "extensions/toolbox/test_mcp", "backends/test_torch_backend", "test_docs", "inference/test_local_images",
    "extensions/sandbox/test_code_env", "extensions/adapters/test_reasoning_gym", "test_gpu_bench",
    "rewards/test_math_reward", "extensions/sandbox/test_published", "test_extensions",
    "extensions/evaluate/test_lm_eval", "trainers/test_needs", "test_wheel",
)  # fmt: skip
"""The files with the most seconds, which begin first; `--fast` leaves them out."""


ROOT = Path(__file__).parent
SHORT_START = ROOT / "tests" / "short_start"
DEADLINE_S = 900  # for one test with its fixtures; the slowest takes 140 s


def pytest_addoption(parser):
    parser.addoption(
        "--sweep", action="store_true", help="run all cases of a kind instead of a sample of them"
    )
    parser.addoption("--fast", action="store_true", help="leave out the files that take longest, see LONGEST")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fail a test that hangs, in the line where it waits, so that the others run."""

    def hangs(number, frame):
        raise TimeoutError(f"{item.nodeid} has run for {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(DEADLINE_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class StopsWhereCollectingFails:
    """End several processes at the first file of tests that fails to import, with 2, as a single process ends.

    xdist would run all others and exit with 1, as after a test that fails. It also reports processes with different tests as
    such a file, which `--last-failed` does not find: it would run every test.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report):
        if report.failed:
            pytest.exit(f"cannot collect {report.nodeid}, see above", returncode=2)


def pytest_configure(config):
    """Give this process a separate temporary directory, so that no other run of the tests holds locks in it.

    Restore Ctrl-C where a shell started the tests in the background, which has all that they start ignore it.

    Without `CI` and `BUILD_NUMBER`, pytest shows where two long values begin to differ. With one of them, it compares the
    bytes of two models line by line, for longer than all tests take.
    """
    for variable in ("CI", "BUILD_NUMBER"):
        os.environ.pop(variable, None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):  # of the process that starts others
        config.pluginmanager.register(StopsWhereCollectingFails())
    # tmp_path stays where it is, also after a failure; other users may enter the directory, as they may that of the machine.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t-")
    os.chmod(tempfile.tempdir, 0o1777)
    Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)


def pytest_collection_modifyitems(config, items):
    """Leave out what only a sweep adds or what takes longest; begin with the longest, so that all processes end together."""
    places = {name: place for place, name in enumerate(LONGEST)}
    ranks = {item: places.get(name_of(item.path), len(LONGEST)) for item in items}
    left_out = (
        set() if config.getoption("sweep") else {item for item in items if item.get_closest_marker("sweep")}
    )
    if config.getoption("fast"):
        left_out |= {item for item in items if ranks[item] < len(LONGEST)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = sorted((item for item in items if item not in left_out), key=ranks.__getitem__)
    if any(item.get_closest_marker("deepspeed") for item in items):
        forked_python.IMPORTED += forked_python.OF_DEEPSPEED


def name_of(file):
    """Return the path of a file of tests in the form of LONGEST."""
    name = str(file.relative_to(ROOT).with_suffix("")) if file.is_relative_to(ROOT) else ""
    return name.removeprefix("tests/")


def pytest_collection_finish():
    """Collect garbage from now on, and have programs that tests start import `short_start/sitecustomize.py`."""
    gc.freeze()
    gc.enable()
    found = [str(SHORT_START), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(found)


def pytest_terminal_summary(terminalreporter, config):
    """Print how long each part took where the slowest tests are asked for, as scripts/test.sh does."""
    if not config.getoption("durations"):
        return
    took = Counter()
    for report in (item for reports in terminalreporter.stats.values() for item in reports):
        if hasattr(report, "duration"):
            took[part_of(report.nodeid.partition("::")[0])] += report.duration
    terminalreporter.section("seconds of each part, over all processes")
    for part, seconds in took.most_common():
        terminalreporter.line(f"{seconds:7.0f} {part}")


def part_of(file):
    """Return the directory of a file of tests; those beside the directories have types, docs and the rest."""
    directory, _, name = file.rpartition("/")
    if directory != "tests":
        return directory
    docs = name.startswith(("test_docs", "test_prose", "test_site", "test_notebook"))
    return "types" if name == "test_types.py" else "docs" if docs else "tests/*.py"


@pytest.fixture(scope="session")
def sweep(pytestconfig):
    """Return whether to run all cases of a kind instead of a sample of them."""
    return pytestconfig.getoption("sweep")


@pytest.fixture(scope="session", autouse=True)
def _same_on_every_processor():
    """Let `model.autocast=auto` choose float32, which many tests compare to the last digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl4llm.compose.setup.multiplies_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def _images(request, tmp_path_factory):
    """Keep images that tests of workspaces unpack out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if not {"workspaces", "tasks", "agents"}.isdisjoint(request.path.parts):
            patch.setenv("RL4LLM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """Leave out the picture of a run's curve, half of the time of a short run, outside the tests of it."""
    if request.path.parent.name != "tracking":
        monkeypatch.setattr("rl4llm.tracking.run.RunTracker._draw_curve", lambda self, step: None)


@pytest.fixture(scope="session")
def tokenizer():
    from rl4llm.backends.tiny import build_tokenizer

    return build_tokenizer(TEXTS * 4, vocab_size=320)


@pytest.fixture(autouse=True)
def _tokenizer_unchanged(request):
    """Fail the test that changes the tokenizer of all tests instead of a copy."""
    shared = request.getfixturevalue("tokenizer") if "tokenizer" in request.fixturenames else None
    before = shared and (shared.chat_template, len(shared))
    yield
    assert before == (shared and (shared.chat_template, len(shared))), "the shared tokenizer has changed"


@pytest.fixture(scope="session")
def _model(tokenizer):
    from rl4llm.backends.tiny import build_model

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
        pytest.skip(
            f"{variable} does not name the Python of an environment with {engine}; scripts/test.sh makes one"
        )
    return os.environ[variable]


@pytest.fixture(scope="session")
def sglang_python():
    return _python_of("sglang")


@pytest.fixture(scope="module")
def sglang_url(model_dir, sglang_python):
    """Start a real SGLang server with the small model, for the tests of one file."""
    from rl4llm.extensions.servers.launch import launch

    adapters = ["--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all"]
    flags = ["--model-path", str(model_dir), "--port", "0", *adapters]
    with launch("sglang", flags, python=sglang_python, cpu=True, ready_within_s=300) as server:
        yield server.url


@pytest.fixture(scope="session")
def python_of():
    """Return python_of("vllm"): the Python of a real server's environment."""
    return _python_of


@pytest.fixture(scope="session")
def on_ranks():
    """Return on_ranks(function, *args): the results of `function(ranks, *args)` on two processes that train together.

    They serve the tests of all files, and start again after a test that fails on a rank or ends one.
    """
    from rank_processes import RankProcesses

    with RankProcesses(size=2) as processes:
        yield processes


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """Return the path of a Python whose programs start with torch imported; see `warm_python`."""
    from warm_python import warm

    with warm(tmp_path_factory.mktemp("warm")) as path:
        yield path


@pytest.fixture(autouse=True)
def _same_start():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def files_of_at_most():
    """Simulate a full disk: inside `with files_of_at_most(size)` no file can grow beyond `size` bytes."""

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
