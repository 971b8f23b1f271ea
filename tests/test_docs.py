"""What the README and the pages of docs/ say is there, and their code runs."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rl4llm.algorithms import ALGORITHMS
from rl4llm.cli import _parsed
from rl4llm.config import load_config
from rl4llm.core.schema import accepted_options
from rl4llm.core.tables import BACKENDS, ENGINES, TOOLS
from rl4llm.envs import ENVIRONMENTS
from rl4llm.rewards import REWARDS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *(ROOT / f"{name}.md" for name in ("AGENTS", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY"))]
PAGES += [ROOT / "configs" / "README.md"]
PAGES += [*sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "scripts").rglob("README.md")) + sorted((ROOT / "extras").glob("*/README.md"))
CONFIGURED = ("train", "launch", "eval", "collect")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page):
    """Return its commands as lists of words, without comments; lines that end in a backslash are joined."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            yield [word for word in shlex.split(line, comments=True) if word not in ("&", "&&")]


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def sentences():
    """Return every string of the source except docstrings, with … in place of values."""
    texts = set()
    for file in (ROOT / "rl4llm").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        texts |= {_text(node) for node in nodes if isinstance(node, ast.expr) and node not in docstrings}
    return sorted(texts - {""})


def _text(node):
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_heading_that_a_page_names_is_there(page):
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")]
    for target in links:
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not heading or heading in anchors(file), target
    named = re.findall(r"`((?:tests|configs|scripts|examples|extras|rl4llm|docs)/[\w./]*)`", text)
    called = re.findall(r"(?<![\w/])(?:scripts|configs|tests|extras)/[\w/]+\.(?:sh|yaml|py)", text)
    assert not [path for path in {*named, *called} if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_accepted(page, monkeypatch):
    """The shell reads them, and rl4llm their words and configurations; test_docs_commands.py runs what needs no servers."""
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    for words in commands(page):
        if "rl4llm" in words and words[-1] != "rl4llm":
            _accepted(words[words.index("rl4llm") + 1 :])
        for at, word in enumerate(words):
            if re.fullmatch(r"scripts/[\w/]+\.py", word):
                _options_known(word, words[at + 1 :])


def test_the_commands_of_workflows_are_accepted():
    """A workflow runs rl4llm by the path of its environment: "$RUNNER_TEMP/venv/bin/rl4llm" train CONFIG."""
    lines = [
        line
        for file in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in file.read_text().splitlines()
    ]
    called = [shlex.split(line) for line in lines if re.search(r"/bin/rl4llm\b", line)]
    assert called
    for words in called:
        at = next(at for at, word in enumerate(words) if word.endswith("/bin/rl4llm"))
        _accepted(words[at + 1 :])


def _accepted(words):
    if words[0] == "serve" or "..." in words:
        return
    arguments = _parsed(words)
    if words[0] in CONFIGURED and Path(arguments.config).exists():
        load_config(arguments.config, arguments.overrides)


def _options_known(script, words):
    source = (ROOT / script).read_text() + "".join(
        file.read_text() for file in (ROOT / script).parent.glob("*.py")
    )
    for word in words:
        if word.strip("[").startswith("--"):
            assert f'"{word.strip("[]").partition("=")[0]}"' in source, (script, word)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_configurations_of_a_page_are_accepted(page, tmp_path):
    for block in blocks(page, "yaml"):
        part = tmp_path / "part.yaml"
        part.write_text(block)
        config = load_config(ROOT / "configs" / "gsm8k_grpo.yaml", [str(part)])
        environments = [config.env, *(own.get("env", {}) for own in config.parts.values())]
        for options in filter(None, environments):
            assert set(options) - {"name"} <= accepted_options(ENVIRONMENTS[options["name"]]), options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_code_of_a_page_runs(page, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    short = {"path/to/model": str(model_dir), "max_steps=10": "max_steps=2", "steps=30": "steps=2"}
    for names in (ENVIRONMENTS, REWARDS, TOOLS):  # what a page registers is gone afterwards
        monkeypatch.setattr(names, "_items", dict(names._items))
    code = [block for block in blocks(page, "python") if "import" in block]
    for block in code:
        for long, given in short.items():
            block = block.replace(long, given)
        exec(block, {})
    if page == README:
        assert [*(tmp_path / "runs").glob("*/metrics.jsonl")]  # of the program that runs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_engines_and_algorithms_on_a_page_exist(page):
    known = {"name", "url", "wait_s", "router", "cohost"}  # of servers, which no client takes
    for table in (ENGINES, ALGORITHMS, BACKENDS):
        known |= {option for name in table for option in accepted_options(table[name])}
    named = re.findall(r"(?<![\w/])(?:inference|algorithm|backend)\.(\w+)=", page.read_text())
    assert not set(named) - known


def test_the_loop_in_the_readme_is_that_of_the_example():
    source = (ROOT / "examples" / "loop.py").read_text()
    loop = next(block for block in blocks(README, "python") if "def loop(" in block)
    assert loop[loop.index("def loop(") : loop.index("\n\n\nloop(")] in source


def test_the_readme_counts_the_methods():
    assert f"(PPO, GRPO, DAPO and {len(list(ALGORITHMS)) - 3} more)" in README.read_text()


def test_messages_in_the_troubleshooting_page_are_in_the_code(sentences):
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]*[a-z]{3} [^`]*)` \|", page, re.MULTILINE)
    assert len(messages) > 12
    assert [message for message in messages if not _said(message, sentences)] == []


def test_failures_in_the_readme_have_messages_and_proofs(sentences):
    section = re.search("^## Ways in which .*?(?=^## )", README.read_text(), re.DOTALL | re.MULTILINE)[0]
    rows = re.findall(r"^\| (?!-|what goes wrong)(.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    messages = [message for _, promise, _ in rows for message in re.findall(r"`([^`]+)`", promise)]
    assert len(rows) == 12 and len(messages) >= 9
    assert [message for message in messages if not _said(message, sentences)] == []
    for failure, _, proofs in rows:
        files = re.findall(r"\]\((tests/[^)]+)\)", proofs)
        assert files and all("def test_" in (ROOT / file).read_text() for file in files), failure


def _said(message, sentences):
    """Return whether the source has a string with the parts of a message that are not …."""
    parts = message.split("…")
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(all(map(sentence.__contains__, parts)) and pattern.search(sentence) for sentence in sentences)


@pytest.mark.parametrize(
    ("page", "names"), [("algorithms", ALGORITHMS), ("environments", ENVIRONMENTS), ("engines", ENGINES)]
)
def test_the_tables_name_all_that_there_is(page, names):
    text = (ROOT / "docs" / f"{page}.md").read_text() + README.read_text()
    listed = {
        name
        for row in re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    ours = {name for name in names if names[name].__module__.startswith("rl4llm.")}
    assert ours <= listed


def test_every_smoke_test_exists():
    for line in (ROOT / "tests" / "smoke.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        assert (ROOT / file).exists(), line
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), line
