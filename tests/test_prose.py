"""The checks of scripts/prose.py find what they should, and the project passes them."""

import ast

import prose
import pytest

PHRASES = prose.settings()["phrase"]


@pytest.mark.sweep  # scripts/test.sh runs the same before the tests
def test_the_project_passes_its_prose_checks():
    assert prose.findings(prose.ROOT) == []


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase["example"])
def test_a_banned_phrase_is_found_and_its_cure_is_not(phrase):
    found = [hit.text for hit in prose.phrases("page.md", 1, f"Here {phrase['example']}\n then.")]
    assert any(phrase["write"] in text for text in found)
    assert list(prose.phrases("page.md", 1, phrase["write"])) == []


def test_phrases_are_found_across_lines_and_in_names():
    source = f'"""A page\n{PHRASES[4]["example"]}."""\ndef test_{PHRASES[4]["example"].replace(" ", "_")}(): pass\n'
    assert {(hit.rule, hit.line) for hit in prose.in_python("tests/a.py", source)} == {
        ("phrase", 1),
        ("phrase", 3),
    }


FUNCTION, CLASS = 'def shown():\n    """{}"""\n', 'class Shown:\n    """{}"""\n'


@pytest.mark.parametrize(("shown", "text", "verb"), [
    (FUNCTION, "Return the number of samples per prompt.", True),
    (FUNCTION, "Process the rows.", True),
    (FUNCTION, "Close.", True),
    (FUNCTION, "Of a rollout.", False),
    (FUNCTION, "The policy's.", False),
    (FUNCTION, "Attempts per prompt.", False),
    (FUNCTION, "Returns the loss.", False),
    (FUNCTION, "Rewards by name.", False),
    (FUNCTION, "Batch of tokens.", False),
    (FUNCTION, "Whether it is done.", False),
    (FUNCTION, "`shape_of` of each tensor.", False),
    (CLASS, "The state of a run that is resumed.", True),
    (CLASS, "Pack trajectories.", True),
    (CLASS, "GRPO: Group Relative Policy Optimization (Shao et al. 2024).", True),
    (CLASS, "Of a rollout.", False),
])  # fmt: skip
def test_a_docstring_begins_with_a_verb_or_has_one_in_a_class(shown, text, verb):
    assert (list(prose.docstrings("rl4llm/a.py", ast.parse(shown.format(text)))) == []) is verb


def test_docstrings_of_private_names_are_not_checked():
    tree = ast.parse('def _a():\n    """Of b."""\nclass _B:\n    def c(self):\n        """Of d."""\n')
    assert list(prose.docstrings("rl4llm/a.py", tree)) == []


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


def test_help_texts_are_checked(monkeypatch):
    import rl4llm.cli

    parser = rl4llm.cli.build_parser()
    parser.description = "word " * 40
    monkeypatch.setattr(rl4llm.cli, "build_parser", lambda: parser)
    assert ("sentence", "`rl4llm_--help`") in [(hit.rule, hit.path) for hit in prose.in_help()]


def test_missing_terms_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(
        prose, "settings", lambda: {"terms": {"weight sync": ["docs"], "retry": ["README.md"]}}
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("Weight\nsync is proven.")
    (tmp_path / "README.md").write_text("Nothing.")
    assert [(hit.path, hit.text) for hit in prose.missing_terms(tmp_path)] == [
        ("README.md", "the term 'retry' is missing")
    ]
