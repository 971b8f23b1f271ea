"""The shape of the package: what imports what, and what an import costs."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sweeps import sampled

from rl4llm import TESTED_TORCH
from rl4llm.core.registry import stubbed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rl4llm"
LAYER = re.compile(r"^\| (\d) \| `(\w+)` \|", re.MULTILINE)
LAYERS = {
    room: int(number) for number, room in LAYER.findall((ROOT / "docs" / "architecture.md").read_text())
}
HEAVY = {
    "deepspeed", "sglang", "vllm", "wandb", "peft", "grpc", "modal", "mcp", "bm25s", "gymnasium", "textarena",
    "openenv", "opentelemetry", "prometheus_client", "IPython", "llguidance", "bitsandbytes",
}  # fmt: skip


@cache
def imports(path):
    """Return the names of modules that a file imports, anywhere in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


def test_imports_point_down():
    assert LAYERS.keys() == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"extensions"}
    upward = []
    for room, layer in LAYERS.items():
        for path in (PACKAGE / room).rglob("*.py"):
            for name in imports(path):
                other = name.split(".")[1] if name.startswith("rl4llm.") else room
                if other != room and LAYERS.get(other, 9) >= (layer or 1):
                    upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not upward


def test_extensions_do_not_import_each_other():
    across = []
    for path in (PACKAGE / "extensions").rglob("*.py"):
        own = path.relative_to(PACKAGE / "extensions").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] == ["rl4llm", "extensions"] and len(parts) > 2 and parts[2] != own:
                across.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not across


def test_a_heavy_package_is_imported_in_one_file():
    places = {}
    for path in PACKAGE.rglob("*.py"):
        for name in {name.split(".")[0] for name in imports(path)} & HEAVY:
            places.setdefault(name, []).append(path.name)
    assert all(len(files) == 1 for files in places.values()), places


def test_importing_rl4llm_is_fast_and_loads_no_torch_or_engine():
    heavy = HEAVY | {"torch", "transformers", "datasets", "matplotlib", "sympy"}
    code = f"""
import sys, time
import rl4llm
seconds = time.process_time()  # of this process, its start included; a busy machine does not stretch it
from rl4llm import load_config
sys.exit(', '.join(sorted({heavy!r} & set(sys.modules))) or (seconds >= 1.5 and f'{{seconds}} s') or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP")
@pytest.mark.parametrize(
    "policy, spins", sampled([(None, "2000"), ("ACTIVE", "30000000000")], [(None, "2000")])
)
def test_waiting_threads_sleep_unless_the_user_chose(plain_run, policy, spins):
    assert f"GOMP_SPINCOUNT = '{spins}'" in plain_run(policy).stderr


UNUSED = [  # what the plain run has no use for, by the beginning of the module's name
    "rl4llm.extensions.", "rl4llm.testing", "rl4llm.algorithms.correction", "rl4llm.backends.lora",
    "rl4llm.backends.sharding", "rl4llm.runs.failed_update", "rl4llm.trainers.mismatched",
    "rl4llm.compose.supervised", "rl4llm.data.overlap", "rl4llm.data.answers", "rl4llm.data.demonstrations",
    "rl4llm.data.mixture", "rl4llm.envs.debate", "rl4llm.envs.mixture", "rl4llm.envs.roles", "rl4llm.envs.tool",
    "rl4llm.rewards.wrappers", "rl4llm.rewards.format", "rl4llm.rewards.length", "rl4llm.trainers.dataset",
]  # fmt: skip
PLAIN = """
data: {path: %s}
model: {path: %s}
eval: {every: 0}
rollout: {prompts: 2, group_size: 2, max_tokens: 4}
output: {dir: %s}
tracking: {tensorboard: false}
max_steps: 1
"""


@pytest.fixture(scope="module")
def plain_run(model_dir, tmp_path_factory):
    """Return plain_run(policy): a small run with this OMP_WAIT_POLICY, which prints its modules at the end."""
    tmp_path = tmp_path_factory.mktemp("plain")
    rows = [{"messages": [{"role": "user", "content": f"Say {n}."}], "ground_truth": str(n)} for n in "12"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.yaml").write_text(PLAIN % (tmp_path / "rows.jsonl", model_dir, tmp_path / "run"))
    code = f"""
import gc, sys
full = []  # begins and ends of full collections; training begins with one
gc.callbacks.append(lambda phase, info: info['generation'] == 2 and not gc.get_freeze_count() and full.append(phase))
from rl4llm.cli import main
code = main(['train', {str(tmp_path / "plain.yaml")!r}])
heavy = {HEAVY | {"matplotlib", "pandas", "datasets", "tensorboard"}!r} & set(sys.modules)
print(*(name for name in sys.modules if name.startswith('rl4llm')), *heavy, file=sys.stderr)
sys.exit(code or full[2:] or 0)"""

    @cache
    def run(policy):
        environ = {
            name: value for name, value in os.environ.items() if not name.endswith(("POLICY", "SPINCOUNT"))
        }
        environ |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({"OMP_WAIT_POLICY": policy} if policy else {})
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_a_plain_run_imports_nothing_that_it_does_not_use(plain_run):
    done = plain_run(None)
    listed = done.stderr.splitlines()[-1].split()  # the parser of the command line loads all commands
    commands = [name for name in listed if "commands" in name or name.endswith("command")]
    names = [name for name in listed if not any(f"{one}.".startswith(f"{name}.") for one in commands)]
    assert "rl4llm.trainers.rl" in names and "rl4llm.rewards.math" in names
    assert [name for name in names if name.startswith(tuple(UNUSED)) or not name.startswith("rl4llm")] == []
    assert len(names) <= 136


@pytest.mark.parametrize("module", ["rl4llm.extensions.launch.ranks", "rl4llm.runtime.watchdog"])
def test_only_what_shards_a_model_imports_the_class_of_shards(module):
    """It takes as long to import as torch itself."""
    code = f"import {module}, sys; sys.exit(' '.join({{'torch.distributed.tensor', 'sympy'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "main(['info'])",
        "main(['info', 'rewards', '--json'])",
        "names('algorithm.name') and names('inference.name') and overrides('env.name=t')",
        "meant()",
    ],
)
def test_names_are_listed_quickly_without_torch(command):
    code = f"""
import sys, time
from rl4llm.algorithms import ALGORITHMS
from rl4llm.cli import main
from rl4llm.commands.completers import names, overrides
from rl4llm.core.errors import ConfigError
def meant():
    try:
        ALGORITHMS['gpro']
    except ConfigError as error:
        assert "Did you mean 'grpo'?" in str(error)
{command}
seconds = time.process_time()
heavy = set(sys.modules) & {HEAVY | {"torch", "transformers", "numpy"}!r}
sys.exit(', '.join(sorted(heavy)) or (seconds >= 1.5 and f'{{seconds}} s') or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported():
    import rl4llm

    for name in rl4llm.__all__:
        assert getattr(rl4llm, name)
    assert len(rl4llm.__all__) <= 40


MOST_LINES = {
    "rl4llm": 68_800,  # grammars, distributions of teachers, rubrics, replay, 4 bits, containers, chat and sweeps
    "tests": 70_400,
    "scripts": 5_520,  # rows of mutants
    "extras": 9_345,
}  # a change that raises one says why beside it


def test_the_repository_does_not_grow():
    lines = {
        folder: sum(
            path.read_text().count("\n")
            for suffix in ("py", "sh")
            for path in (ROOT / folder).rglob(f"*.{suffix}")
            if "build" not in path.parts  # what pip leaves in a package of extras/
        )
        for folder in MOST_LINES
    }
    assert not {folder: count for folder, count in lines.items() if count > MOST_LINES[folder]}


@pytest.mark.parametrize("stub", sorted(PACKAGE.rglob("__init__.pyi")), ids=lambda stub: stub.parent.name)
def test_stubs_name_the_modules_of_lazy_names(stub):
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    assert package.__all__
    for name, module in stubbed(stub).items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)


def test_help_waits_for_nothing_heavy():
    heavy = HEAVY | {"torch", "transformers", "numpy", "omegaconf", "aiohttp"}
    build = "import sys, rl4llm.cli\nrl4llm.cli.build_parser()"
    code = f"{build}\nsys.exit(', '.join(sorted({heavy!r} & set(sys.modules))) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_lock_has_exactly_the_requirements_with_hashes():
    """What to do when this fails: scripts/lock.sh writes the lock again."""
    setup = (ROOT / "setup.py").read_text()
    extras = ast.literal_eval(re.search(r"^EXTRAS = (\{.*?^\})", setup, re.MULTILINE | re.DOTALL)[1])
    asked = {"core": ast.literal_eval(re.search(r"install_requires=(\[.*?\n    \])", setup, re.DOTALL)[1])}
    asked |= {name: extras[name] for name in ("dev", "deepspeed", "reasoning", "docs", "real")}
    locked = {name: lines(ROOT / "scripts" / "lock" / f"{name}.txt") for name in asked}
    for name, wanted in asked.items():
        versions = {}
        for pin, *hashes in (*locked["core"], *locked[name]):
            requirement = Requirement(pin)
            versions.setdefault(requirement.name, []).append(str(requirement.specifier).removeprefix("=="))
            assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)) and not requirement.url
            assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", item) for item in hashes)
        # of the machine
        assert not {item for item in versions if re.match("(torch|triton|cuda|nvidia)(-|$)", item)}
        for requirement in map(Requirement, wanted):
            if requirement.name != "torch":
                found = versions[canonicalize_name(requirement.name)]
                assert all(version in requirement.specifier for version in found), requirement


def lines(lock):
    """Return a pin and its hashes for each package."""
    return [re.split(r"\s+(?=--hash)", line) for line in lock.read_text().replace("\\\n", " ").splitlines()]


@pytest.fixture
def checkout(tmp_path):
    """Return a directory with what scripts/environment.sh reads."""
    for pattern in ("scripts/lock/*", "scripts/environment.sh", "setup.py", "extras/*/pyproject.toml"):
        for file in ROOT.glob(pattern):
            copy = tmp_path / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return tmp_path


@pytest.mark.parametrize("gpu", [False, True])
def test_every_machine_gets_the_torch_that_tests_ran_with(checkout, gpu):
    python, pip, log = (checkout / ".venv" / name for name in ("bin/python", "bin/pip", "log"))
    programs = [python, *([checkout / "nvidia-smi"] if gpu else [])]
    for program in programs:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$*" >> {log}\n')
        program.chmod(0o755)
    pip.symlink_to(python)
    environment = {**os.environ, "RL4LLM_PYTHON": sys.executable, "RL4LLM_VENV": str(checkout / ".venv")}
    environment["PATH"] = f"{checkout}:{environment['PATH']}"
    command = ["bash", "-c", ". scripts/environment.sh"]
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
    asked = [line.split()[-1] for line in log.read_text().splitlines() if "torch==" in line]
    tried = re.search(r"torch(>=\S+)\",  # tried: ([\d.]+);", (ROOT / "setup.py").read_text())
    assert asked == [f"torch=={tried[2]}"]
    assert tried[2] in Requirement(f"torch{tried[1]}").specifier
    major, minor = TESTED_TORCH[-1].split(".")
    # no test runs with it
    assert f"{major}.{int(minor) + 1}.0" not in Requirement(f"torch{tried[1]}").specifier
