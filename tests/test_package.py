"""The shape of the package: what imports what, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "rl4llm"
LAYERS = {  # a file may import from its own layer's folder and from lower layers; equal numbers never import each other
    "core": 0,
    "sandbox": 0.5,  # rewards, environments and graders all run programs in it
    "algorithms": 1,
    "data": 1,
    "rewards": 1,
    "envs": 2,
    "inference": 2,
    "backends": 2,
    "sync": 2,
    "tracking": 2,
    "trainers": 3,
}
HEAVY = {
    "deepspeed", "sglang", "vllm", "wandb", "mlflow", "trackio", "peft", "grpc", "modal", "mcp", "bm25s", "gymnasium",
    "openenv", "ray",
}  # fmt: skip


def imports(path):
    """Names of modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_point_down():
    upward = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room not in LAYERS:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "rl4llm" or len(parts) < 2 or parts[1] == room:
                continue
            if LAYERS.get(parts[1], 9) >= LAYERS[room]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not upward


def test_a_heavy_package_is_imported_in_one_file():
    places = {}
    for path in PACKAGE.rglob("*.py"):
        for name in {name.split(".")[0] for name in imports(path)} & HEAVY:
            places.setdefault(name, []).append(path.name)
    assert all(len(files) == 1 for files in places.values()), places


def test_importing_rl4llm_is_fast_and_loads_neither_torch_nor_an_engine():
    heavy = HEAVY | {"torch", "transformers", "datasets", "matplotlib", "sympy"}
    code = f"""
import sys, time
import rl4llm
seconds = time.process_time()  # of this process, its start included; a busy machine does not stretch it
from rl4llm import GRPOConfig, load_config
sys.exit(', '.join(sorted({heavy!r} & set(sys.modules))) or (seconds >= 1.5 and f'{{seconds}} s') or 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported():
    import rl4llm

    for name in rl4llm.__all__:
        assert getattr(rl4llm, name)


def test_help_waits_for_nothing_heavy():
    heavy = HEAVY | {"torch", "transformers", "numpy", "omegaconf", "aiohttp"}
    code = (
        f"import sys, rl4llm.cli\nrl4llm.cli.build_parser()\nsys.exit(', '.join(sorted({heavy!r} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
