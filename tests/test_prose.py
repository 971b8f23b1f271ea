"""The checks of scripts/prose.py find what they should, and the project passes them."""

import prose
import pytest

PHRASES = prose.SETTINGS["phrase"]


@pytest.mark.sweep  # scripts/test.sh runs the same before the tests
def test_the_project_passes_its_prose_checks():
    assert prose.findings(prose.ROOT) == []


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase["example"])
def test_a_banned_phrase_is_found_and_its_cure_is_not(phrase):
    found = [hit.text for hit in prose.phrases("page.md", 1, f"Here {phrase['example']}\n then.")]
    assert any(phrase["write"] in text for text in found)
    assert list(prose.phrases("page.md", 1, phrase["write"])) == []


LONG = "word " * 36
NO_PROSE = f"Read [it]({'x/' * 40}) and `{'a ' * 40}`.\n\n```bash\n{'run ' * 50}\n```\n\n| {'a ' * 20} | {'b ' * 20} |\n"


@pytest.mark.parametrize(("file", "text", "rules"), [
    ("a.md", f"One. {LONG}.\n{'Two. ' * 9}", ["sentence"]),
    ("a.md", f"{LONG}.\n", ["sentence", "mean"]),
    ("a.md", "word " * 20 + ". " + "Word " * 20 + ".\n", []),
    ("a.md", NO_PROSE, []),
    ("a.md", "One; two; three.\n", ["sentence"]),
    ("tests/a.py", f"def test_{'a' * 55}(): pass\n", []),
    ("tests/a.py", f"def test_{'a' * 56}(): pass\n", ["test-name"]),
])  # fmt: skip
def test_long_sentences_and_names_of_tests_are_found(file, text, rules):
    found = prose.in_python if file.endswith(".py") else prose.in_markdown
    assert [hit.rule for hit in found(file, text)] == rules
