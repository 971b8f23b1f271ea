"""Check how the project is written: banned phrases, long sentences, long names of tests.

    python scripts/prose.py            # print each finding and exit with 1 if there is one

docs/style.md is the guide in words. scripts/prose.toml has the phrases and limits.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LIMITS = SETTINGS["limits"]
PHRASES = [(re.compile(item["pattern"], re.IGNORECASE), item["write"]) for item in SETTINGS["phrase"]]
ANY_PHRASE = re.compile("|".join(item["pattern"] for item in SETTINGS["phrase"]), re.IGNORECASE)


class Hit(NamedTuple):
    """A finding, and where it is."""

    rule: str
    path: str
    line: int
    text: str


def main() -> int:
    """Print what is wrong with the checkout that contains this script."""
    problems = [f"{hit.path}:{hit.line}: {hit.rule}: {hit.text}" for hit in findings(ROOT)]
    if problems:
        print(*problems, sep="\n")
        print(f"{len(problems)} problems; docs/style.md has the rules.", file=sys.stderr)
    return int(bool(problems))


def findings(root: Path) -> list[Hit]:
    """Return every finding in the tracked files and the help texts."""
    tracked = subprocess.check_output(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "*.py", "*.md", "*.sh", "*.yaml"],
        text=True,
    )
    checks = {".md": in_markdown, ".py": in_python}
    hits: list[Hit] = []
    for name in sorted({line for line in tracked.splitlines() if (root / line).is_file()}):
        hits += checks.get(Path(name).suffix, in_comments)(name, (root / name).read_text("utf-8"))
    return [*hits, *in_help()]


# Files


def in_markdown(name: str, text: str) -> Iterator[Hit]:
    """Check the paragraphs of a page. The changelog is history, so only its phrases are checked."""
    for line, block in blocks(text):
        yield from phrases(name, line, block)
    if name == "CHANGELOG.md":
        return
    lengths = []
    for line, block in blocks(without_code(text)):
        for sentence in sentences(block):
            lengths.append(count_words(sentence))
            yield from long_sentence(name, line, sentence)
    mean = sum(lengths) / max(len(lengths), 1)
    if mean > LIMITS["mean_words"]:
        yield Hit("mean", name, 1, f"{mean:.1f} words per sentence, at most {LIMITS['mean_words']}")


def in_python(name: str, text: str) -> Iterator[Hit]:
    """Check the strings and the names of tests of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from phrases(name, node.lineno, node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield from phrases(name, node.lineno, node.name.replace("_", " "))
            if len(node.name) > LIMITS["test_name"]:
                yield Hit("test-name", name, node.lineno, f"{node.name} is longer than {LIMITS['test_name']}")


def in_comments(name: str, text: str) -> Iterator[Hit]:
    """Check the comments of a shell script or a YAML file, joined over neighbouring lines."""
    comments = re.sub(r"(?m)^(?:.*?[ \t])??#(.*)|^.+", r"\1", text)
    for line, block in blocks(comments):
        yield from phrases(name, line, block)


def in_help() -> Iterator[Hit]:
    """Check the sentences of `rl4llm --help` and of the help of every command."""
    from rl4llm.cli import build_parser

    parsers = [build_parser()]
    for parser in parsers:
        texts = [parser.description or "", *(action.help or "" for action in parser._actions)]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                texts += [choice.help or "" for choice in action._choices_actions]
                parsers += action.choices.values()
        name = f"`{parser.prog} --help`".replace(" ", "_")
        for sentence in (sentence for text in texts for sentence in sentences(text)):
            yield from phrases(name, 1, sentence)
            yield from long_sentence(name, 1, sentence)


# Rules


def phrases(name: str, line: int, text: str) -> Iterator[Hit]:
    """Yield the banned phrases of a text."""
    text = " ".join(text.split())
    if ANY_PHRASE.search(text):  # most texts have none
        for pattern, write in PHRASES:
            for match in pattern.finditer(text):
                yield Hit("phrase", name, line, f"{match[0]!r}; write: {write}")


def long_sentence(name: str, line: int, sentence: str) -> Iterator[Hit]:
    """Yield a sentence that has too many words or semicolons."""
    length, start = count_words(sentence), " ".join(sentence.split()[:8])
    if length > LIMITS["sentence_words"]:
        yield Hit("sentence", name, line, f"{length} words, at most {LIMITS['sentence_words']}: {start} ...")
    if sentence.count(";") > LIMITS["semicolons"]:
        yield Hit("sentence", name, line, f"a chain of semicolons: {start} ...")


# Text


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the paragraphs, which empty lines separate."""
    for match in re.finditer(r"(?:.*\S.*\n?)+", text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def without_code(text: str) -> str:
    """Return a page without blocks of code, comments, pictures and targets of links; `code` counts as one word."""
    for pattern in (r"(?ms)^ *```.*?^ *```", r"(?s)<!--.*?-->"):
        text = re.sub(pattern, lambda match: "\n" * match[0].count("\n"), text)
    text = re.sub(r"(`+).+?\1", "code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"code(?:(?:,| and| or|, and|, or)\s+code)+", "code", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph; a heading, a list item and a cell of a table each end one."""
    for part in re.split(r"\n(?=\s*(?:[-*#]|\d+\.) )|\|", text):
        joined = " ".join(part.split()).lstrip("-*# ")
        yield from filter(None, re.split(r"(?<=[.!?:])[)*_]*\s+(?=[A-Z\"'(\[*_]|code\b)", joined))


def count_words(sentence: str) -> int:
    """Return the number of words that have a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


if __name__ == "__main__":
    sys.exit(main())
