"""Check how the project is written: banned phrases, long sentences, docstrings without a verb, test names, missing terms.

    python scripts/prose.py            # print each finding and exit with 1 if there is one

docs/style.md is the guide in words. scripts/prose.toml has the phrases, limits and terms.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ("rl4llm", "examples")
HISTORY = "CHANGELOG.md"


class Hit(NamedTuple):
    """A finding, and where it is."""

    rule: str
    path: str
    line: int
    text: str


def main() -> int:
    """Print what is wrong with the checkout that contains this script."""
    problems = [f"{hit.path}:{hit.line}: {hit.rule}: {hit.text}" for hit in findings(ROOT)]
    print(*problems, sep="\n", end="\n" if problems else "")
    if problems:
        print(f"{len(problems)} problems; docs/style.md has the rules.", file=sys.stderr)
    return int(bool(problems))


def findings(root: Path) -> list[Hit]:
    """Return every finding in the tracked files, the help texts and the terms of the pages."""
    tracked = subprocess.check_output(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "*.py", "*.md", "*.sh", "*.yaml"],
        text=True,
    )
    hits: list[Hit] = []
    for name in sorted({line for line in tracked.splitlines() if (root / line).is_file()}):
        text = (root / name).read_text("utf-8")
        if name.endswith(".md"):
            hits += in_markdown(name, text)
        elif name.endswith(".py"):
            hits += in_python(name, text)
        else:
            hits += in_comments(name, text)
    return [*hits, *in_help(), *missing_terms(root)]


# Files


def in_markdown(name: str, text: str) -> Iterator[Hit]:
    """Check the paragraphs of a page. The changelog is history, so only its phrases are checked."""
    for line, block in blocks(text):
        yield from phrases(name, line, block)
    if name == HISTORY:
        return
    lengths = []
    for line, block in blocks(without_code(text)):
        for sentence in sentences(block):
            lengths.append(count_words(sentence))
            yield from long_sentence(name, line, sentence)
    mean, limit = sum(lengths) / max(len(lengths), 1), settings()["limits"]["mean_words"]
    if mean > limit:
        yield Hit("mean", name, 1, f"{mean:.1f} words per sentence on average; the limit is {limit}")


def in_python(name: str, text: str) -> Iterator[Hit]:
    """Check the strings, test names and docstrings of a module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from phrases(name, node.lineno, node.value)
        elif isinstance(node, FUNCTION) and node.name.startswith("test_"):
            yield from phrases(name, node.lineno, node.name.replace("_", " "))
            if len(node.name) > (limit := settings()["limits"]["test_name"]):
                yield Hit(
                    "test-name",
                    name,
                    node.lineno,
                    f"{node.name} has {len(node.name)} characters, not {limit}",
                )
    if name.split("/")[0] in DOCUMENTED:
        yield from docstrings(name, tree)


def in_comments(name: str, text: str) -> Iterator[Hit]:
    """Check the comments of a shell script or a YAML file, joined over neighbouring lines."""
    comments = [
        match[1] if (match := re.search(r"(?:^|\s)#(.*)", line)) else "" for line in text.splitlines()
    ]
    for line, block in blocks("\n".join(comments)):
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


def missing_terms(root: Path) -> Iterator[Hit]:
    """Yield the terms that their pages do not contain; a folder means any page in it except the style guide."""
    for term, places in settings()["terms"].items():
        for place in places:
            pages = [root / place] if place.endswith(".md") else sorted((root / place).rglob("*.md"))
            texts = (page.read_text("utf-8") for page in pages if page.name != "style.md")
            text = " ".join(" ".join(texts).lower().split())
            if term not in text:
                yield Hit("term", place, 1, f"the term {term!r} is missing")


# Rules


def phrases(name: str, line: int, text: str) -> Iterator[Hit]:
    """Yield the banned phrases of a text."""
    text = " ".join(text.split())
    if any_phrase().search(text):
        for pattern, write in each_phrase():
            for match in pattern.finditer(text):
                yield Hit("phrase", name, line, f"{match[0]!r}; write: {write}")


def long_sentence(name: str, line: int, sentence: str) -> Iterator[Hit]:
    """Yield a sentence that has too many words or semicolons."""
    limits = settings()["limits"]
    length, start = count_words(sentence), " ".join(sentence.split()[:8])
    if length > limits["sentence_words"]:
        yield Hit("sentence", name, line, f"{length} words, at most {limits['sentence_words']}: {start} ...")
    if sentence.count(";") > limits["semicolons"]:
        yield Hit("sentence", name, line, f"a chain of semicolons: {start} ...")


def docstrings(name: str, tree: ast.Module) -> Iterator[Hit]:
    """Yield the docstrings of public names that have no verb."""
    for line, kind, text in documented(tree):
        first = " ".join(text.split("\n\n")[0].split())
        if kind == "function" and not starts_with_verb(first):
            yield Hit("docstring", name, line, f"start with a verb in the imperative: {first[:60]!r}")
        elif kind != "function" and not (starts_with_verb(first) or has_verb(text) or is_title(first)):
            yield Hit("docstring", name, line, f"a {kind} without a verb: {first[:60]!r}")


def documented(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and docstring of a module and of its public classes, functions and methods."""
    if isinstance(node, ast.Module) and (text := ast.get_docstring(node)):
        yield 1, "module", text
    for child in getattr(node, "body", ()):
        if not isinstance(child, FUNCTION | ast.ClassDef) or child.name.startswith("_"):
            continue
        if text := ast.get_docstring(child):
            yield child.lineno, kind_of(child), text
        if isinstance(child, ast.ClassDef):
            yield from documented(child)


def kind_of(node: FUNCTION | ast.ClassDef) -> str:
    """Return "class", "property" or "function"."""
    if isinstance(node, ast.ClassDef):
        return "class"
    names = [getattr(item, "id", getattr(item, "attr", "")) for item in node.decorator_list]
    return "property" if {"property", "cached_property"} & {*names} else "function"


def starts_with_verb(text: str) -> bool:
    """Return whether a text could begin with an imperative: a plain word that starts no noun or fragment."""
    first = re.match(r"[A-Z][a-z]+(?:-[a-z]+)*(?=[ .,:;]|$)", text)
    if not first or first[0].lower() in words("no_verb") or re.match(r"\S+ of\b", text):
        return False
    return not first[0].endswith("s") or first[0].lower() in words("verbs_in_s")


def is_title(text: str) -> bool:
    """Return whether a text begins with the name of a method and what it stands for, as "GRPO: Group Relative ..."."""
    return bool(re.match(r"[A-Z][A-Za-z+-]*: [A-Z]", text))


def has_verb(text: str) -> bool:
    """Return whether a text has a word that could be a verb, such as "is", "trains", "trained" or "to train"."""
    found = set(re.findall(r"[a-z]+", text))
    inflected = [word for word in found if len(word) > 3 and re.search(r"([^s]s|ed|ing|en)$", word)]
    return bool(words("verbs") & found or inflected)


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
        yield from (
            item for item in re.split(r"(?<=[.!?:])[)*_]*\s+(?=[A-Z\"'(\[*_]|code\b)", joined) if item
        )


def count_words(sentence: str) -> int:
    """Return the number of words that have a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@cache
def settings() -> dict[str, Any]:
    """Read scripts/prose.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@cache
def words(name: str) -> frozenset[str]:
    """Return a list of words of scripts/prose.toml."""
    return frozenset(settings()["words"][name].split())


@cache
def each_phrase() -> list[tuple[re.Pattern[str], str]]:
    """Return each banned phrase with what to write instead."""
    return [(re.compile(item["pattern"], re.IGNORECASE), item["write"]) for item in settings()["phrase"]]


@cache
def any_phrase() -> re.Pattern[str]:
    """Return one pattern for all phrases, because most texts have none of them."""
    return re.compile("|".join(pattern.pattern for pattern, _ in each_phrase()), re.IGNORECASE)


if __name__ == "__main__":
    sys.exit(main())
