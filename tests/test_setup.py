"""What an index shows of the package: its description, addresses and extras."""

import os
import re
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from rl4llm import TESTED_TORCH

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/michaelnny/rl4llm"


@pytest.fixture(scope="module")
def about(tmp_path_factory):
    """Return the metadata that a wheel of this checkout has."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "rl4llm/__init__.py"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    code = "from setuptools.build_meta import *; prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True, timeout=120)
    return message_from_bytes(next(copy.glob("*.dist-info/METADATA")).read_bytes())


def test_description_links_reach_this_version(about):
    page = re.sub(r"^```.*?^```$", "", about.get_payload(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", page) + re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    inside = [link for link in links if re.match(f"{REPOSITORY}/(blob|raw)/", link)]
    for link in inside:
        kind, version, path = link.removeprefix(f"{REPOSITORY}/").split("/", 2)
        path, _, heading = path.partition("#")
        assert version == f"v{about['Version']}" and (ROOT / path).exists(), link
        assert (kind == "raw") == path.endswith((".png", ".svg")) and not (heading and kind == "raw"), link
    assert len(inside) > 20


def test_extra_all_brings_what_users_need_and_no_more(about):
    wanted = [Requirement(line) for line in about.get_all("Requires-Dist")]

    def packages(extra):
        return {item.name for item in wanted if item.marker and item.marker.evaluate({"extra": extra})}

    assert {"peft", "wandb", "gymnasium", "deepspeed"} <= packages("all")
    tools = {"pytest", "ruff", "mypy", "mkdocs", "mkdocs-material", "mike"}
    assert tools <= packages("dev") | packages("docs")
    assert not packages("all") & (tools | {"sglang", "vllm", "torch", "types-psutil"})


@pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem
)
def test_workflow_pins_actions_and_rights(workflow):
    settings = yaml.safe_load(workflow.read_text())
    assert settings["permissions"] == {"contents": "read"}  # jobs ask for more where they need it
    for job in settings["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", "a/b@" + "0" * 40)), step
            for script in re.findall(r"(?:scripts|\.ci)/[\w./]+", step.get("run", "")):
                assert (ROOT / script).exists(), script


@pytest.mark.parametrize("script", ["train_gsm8k_grpo.sh", "train_tool_dapo.sh", "train_cohost.sh"])
def test_script_serves_the_model_that_it_trains(script, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    sum_of = "cat setup.py scripts/lock/*.txt | cksum"
    installed = subprocess.run(["sh", "-c", sum_of], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    (tmp_path / "rl4llm-installed").write_text(f"deepspeed {installed}\n")
    programs = {
        "pip": "exit 0",
        # The server is healthy when it has begun.
        "python": f'case "$*" in *urllib*) exec test -e {tmp_path}/ran ;; esac; exec {sys.executable} "$@"',
        "rl4llm": f'echo "$@" >> {tmp_path}/ran; case "$1" in serve) exec sleep 60 ;; esac',
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environ = os.environ | {"RL4LLM_VENV": str(tmp_path), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    words = [f"model.path={tmp_path}/mine", "max_steps=3", "--force"]
    done = subprocess.run([ROOT / "scripts" / script, *words], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran = (tmp_path / "ran").read_text()
    assert (
        f"--model-path {tmp_path}/mine" in ran and f"model.path={tmp_path}/mine" in ran and "--force" in ran
    )


def test_image_has_the_torch_of_the_scripts():
    """Both install one version of torch, every night tries the others, and setup.py accepts what was tried."""
    found = [
        re.findall(r"torch==([\d.]+)", (ROOT / name).read_text())
        for name in ("Dockerfile", "scripts/environment.sh")
    ]
    assert found[0] == found[1] and f"tried: {found[0][0]}" in (ROOT / "setup.py").read_text()
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["torch"]
    versions = [*found[0], *nightly["strategy"]["matrix"]["torch"]]
    assert sorted({version.rpartition(".")[0] for version in versions}) == list(TESTED_TORCH)
    named = re.findall(r"^COPY (\S+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert named and all((ROOT / name).exists() for name in named)
