"""Search over a local corpus as a tool: BM25 by the package bm25s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.message import shortened
from rl4llm.core.registry import needed
from rl4llm.data.read import read_rows
from rl4llm.envs.tools.tool import ToolSet, tool

TEXT_FILES = (".txt", ".md")


class Search(ToolSet):
    """Finds the documents of a corpus that share the most telling words with a query (BM25, Robertson et al., 1994).

    Args:
        corpus: rows with a `text` and perhaps a `title`, given as such or in a file of any kind that datasets may lie in; or
            a directory with text files.
        results: how many documents are shown.
        max_chars: of each.
    """

    def __init__(self, corpus: str | Sequence[Mapping[str, Any]], results: int = 3, max_chars: int = 500):
        super().__init__()
        self._results = results
        bm25s = needed("bm25s", "env.tools: search", "search")
        documents = list(_read(corpus))
        if not documents:
            raise DataError(f"env.tools: search: corpus={corpus!r} has no documents.")
        self._documents = [f"{title}\n{shortened(text, max_chars)}".strip() for title, text in documents]
        self._words = lambda texts: bm25s.tokenize(texts, stopwords="en", show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(self._words([" ".join(document) for document in documents]), show_progress=False)

    @tool
    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: The words to look for.
        """
        count = min(self._results, len(self._documents))
        numbers, scores = self._index.retrieve(self._words([query]), k=count, show_progress=False)
        pairs = zip(numbers[0], scores[0], strict=True)
        texts = [self._documents[number] for number, score in pairs if score > 0]
        return "\n\n".join(texts) or "No document has these words."


def _read(corpus: str | Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    path = Path(corpus) if isinstance(corpus, str) else Path()
    is_directory = isinstance(corpus, str) and path.is_dir()
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_FILES) if is_directory else []
    for file in files:
        yield file.relative_to(path).as_posix(), file.read_text(errors="replace")
    for where, row in () if files else read_rows(corpus, "train"):
        if not isinstance(row.get("text"), str):
            raise DataError(f"env.tools: search: {where} of the corpus has no text in the column 'text'.")
        yield str(row.get("title") or ""), row["text"]
