"""What the README says is there, and its code runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_file_that_the_readme_names_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    named = re.findall(r"`((?:tests|configs|scripts|examples|rl4llm)/[\w./]*)`", README)
    commands = re.findall(r"\b(?:scripts|configs)/[\w/]+\.(?:sh|yaml|py)", README)
    assert len(links) > 4
    assert not [path for path in {*links, *named, *commands} if not (ROOT / path).exists()]


def test_the_python_code_of_the_readme_runs(model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = [block for block in blocks("python") if "import" in block]
    assert code
    for block in code:
        exec(block.replace("path/to/model", str(model_dir)).replace("max_steps=10", "max_steps=2"), {})
    assert (tmp_path / "runs" / "rl4llm" / "metrics.jsonl").exists()


def test_the_loop_in_the_readme_is_the_loop_of_the_code():
    source = (ROOT / "rl4llm" / "core" / "base_trainer.py").read_text()
    loop = next(block for block in blocks("python") if "collect()" in block)
    lines = [line.split("#")[0].strip() for line in loop.splitlines()]
    code = {line.split("#")[0].strip() for line in source.splitlines()}
    for line in lines[3:]:  # the `while` also asks whether a signal came
        assert line in code, line


def test_the_tests_of_the_continuous_integration_are_the_readmes_command():
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    assert "scripts/test.sh" in README
