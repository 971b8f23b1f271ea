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


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("Return the number of samples per prompt.", True),
        ("Process the rows.", True),
        ("Close.", True),
        ("Of a rollout.", False),
        ("The policy's.", False),
        ("Attempts per prompt.", False),
        ("Returns the loss.", False),
        ("Rewards by name.", False),
        ("Batch of tokens.", False),
        ("Whether it is done.", False),
        ("`shape_of` of each tensor.", False),
    ],
)
def test_a_function_docstring_starts_with_a_verb(text, verb):
    tree = ast.parse(f'def shown():\n    """{text}"""\n')
    assert (list(prose.docstrings("rl4llm/a.py", tree)) == []) is verb


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("The state of a run that is resumed.", True),
        ("Pack trajectories.", True),
        ("GRPO: Group Relative Policy Optimization (Shao et al. 2024).", True),
        ("Of a rollout.", False),
    ],
)
def test_a_class_docstring_has_a_verb_somewhere(text, verb):
    tree = ast.parse(f'class Shown:\n    """{text}"""\n')
    assert (list(prose.docstrings("rl4llm/a.py", tree)) == []) is verb


def test_docstrings_of_private_names_are_not_checked():
    tree = ast.parse('def _a():\n    """Of b."""\nclass _B:\n    def c(self):\n        """Of d."""\n')
    assert list(prose.docstrings("rl4llm/a.py", tree)) == []


def test_a_sentence_above_the_limit_is_found():
    words = "word " * 36
    assert [hit.rule for hit in prose.in_markdown("a.md", f"One. {words}.\n{'Two. ' * 9}")] == ["sentence"]
    assert [hit.rule for hit in prose.in_markdown("a.md", f"{words}.\n")] == ["sentence", "mean"]
    assert list(prose.in_markdown("a.md", "word " * 20 + ". " + "Word " * 20 + ".\n")) == []


def test_code_links_and_cells_do_not_lengthen_a_sentence():
    page = f"Read [it]({'x/' * 40}) and `{'a ' * 40}`.\n\n```bash\n{'run ' * 50}\n```\n\n| {'a ' * 20} | {'b ' * 20} |\n"
    assert list(prose.in_markdown("a.md", page)) == []


def test_a_chain_of_semicolons_is_found():
    assert [hit.rule for hit in prose.in_markdown("a.md", "One; two; three.\n")] == ["sentence"]


def test_a_test_name_above_the_limit_is_found():
    name = "test_" + "a" * 55
    assert list(prose.in_python("tests/a.py", f"def {name}(): pass\n")) == []
    assert [hit.rule for hit in prose.in_python("tests/a.py", f"def {name}a(): pass\n")] == ["test-name"]


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
