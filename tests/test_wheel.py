"""What is installed works without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked(*folders):
    """Return the names of the files that a checkout has in these folders."""
    known = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if known.returncode:
        pytest.skip("this is not a git checkout, so what belongs to it is not known")
    # no links to directories
    return {name for name in known.stdout.splitlines() if not (ROOT / name).is_dir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the wheel and the source archive of a clean copy of the checkout and return their directory."""
    copy, target = tmp_path_factory.mktemp("copy") / "rl4llm", tmp_path_factory.mktemp("dist")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    (copy / "rl4llm" / "configs").symlink_to("../configs")
    code = f"from setuptools.build_meta import *; build_wheel({str(target)!r}); build_sdist({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return `command(*words)`, which runs the installed rl4llm in an empty directory with these dependencies."""
    venv, empty = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next((venv / "lib").glob("python3.*/site-packages"))
    (packages / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages")) + "\n"
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv / "bin" / "python"),
        "install",
        "--quiet",
        "--no-deps",
    ]
    wheel = next(built.glob("*.whl"))
    subprocess.run([*pip, "--no-index", "--ignore-installed", str(wheel)], check=True, cwd=empty)

    def command(*words, timeout=300):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = venv / "bin" / words[0]
        return subprocess.run(
            [str(program), *words[1:]],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    where = command("python", "-c", "import rl4llm; print(rl4llm.__file__)").stdout.strip()
    assert where.startswith(str(venv)), f"the repository's rl4llm is imported: {where}"
    return command


def test_the_wheel_has_exactly_the_package_and_configurations(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {name for name in tracked("rl4llm") if not name.endswith(".md")}
    used = (".yaml", ".py", "/results.json")  # no logs and episodes of recipes
    wanted |= {f"rl4llm/{name}" for name in tracked("configs") if name.endswith(used)}
    assert names == wanted


def test_the_source_archive_has_all_tracked_files(built):
    archive = next(built.glob("*.tar.gz"))
    listed = subprocess.run(
        ["tar", "tzf", str(archive)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = {name.partition("/")[2] for name in listed if not name.endswith("/")}
    wanted = {name for name in tracked() if not name.startswith(".")}
    assert wanted <= names
    made = {f"rl4llm/{name}" for name in tracked("configs")} | {"PKG-INFO", "setup.cfg"}
    assert not {name for name in names - wanted - made if not name.startswith("rl4llm.egg-info/")}


def test_the_wheel_trains_in_an_empty_directory(installed, model_dir):
    assert installed("rl4llm", "--version").stdout.startswith("rl4llm ")
    few = ["rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=4", "eval.every=0", "max_steps=1"]
    given = (
        "configs/quickstart.yaml",
        f"model.path={model_dir}",
        "output.dir=run",
        "tracking.tensorboard=false",
        *few,
    )
    done = installed("rl4llm", "train", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
