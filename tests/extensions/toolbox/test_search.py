"""Search in a corpus as a tool."""

import pytest

from rl4llm.core.errors import DataError
from rl4llm.extensions.toolbox.search import Search

DOCUMENTS = [
    {"title": "Ada Lovelace", "text": "She wrote the first program, for a machine that was never built."},
    {"title": "Grace Hopper", "text": "She wrote the first compiler."},
    {"text": "Cats sleep most of the day."},
]


def test_search_finds_documents_with_words_of_the_query(tmp_path):
    pytest.importorskip("bm25s")
    search = Search(DOCUMENTS, results=2, max_chars=25).search
    cut = "She wrote th[... cut ...]"
    assert search("Who wrote the first compiler?") == f"Grace Hopper\n{cut}\n\nAda Lovelace\n{cut}"
    assert search("cats") == "Cats sleep m[... cut ...]"
    for nothing in ("", "the", "zebra", "\ud800"):
        assert search(nothing) == "No document has these words."
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ada.md").write_text("Ada wrote a program.")
    assert Search(str(tmp_path)).search("program") == "sub/ada.md\nAda wrote a program."
    for corpus in ([DOCUMENTS[0], {"title": "no text"}], []):
        with pytest.raises(DataError):
            Search(corpus)
