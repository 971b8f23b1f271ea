"""Read stored rows from files, directories and the hub. Each row comes with its place, for error messages."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError, did_you_mean
from rl4llm.core.message import read_json
from rl4llm.core.tables import DIRECTORIES
from rl4llm.data.columns import arrow_row
from rl4llm.runtime.hub import hub_answers

Located = tuple[str, Any]
"""The place of a row ("train.jsonl:17"), and the row."""

_SHARD = re.compile(r"(?P<number>\d+)-of-(?P<of>\d+)(?P<suffix>\.[a-z.]+)$")
_SPLITS = ("train", "validation", "test")
_HUB_NAME = re.compile(r"(?P<name>[\w.\-]+/[\w.\-]+)(:(?P<config>[\w.\-]+))?")
_ACCEPTED = (
    "a .jsonl, .jsonl.gz, .json, .parquet or .csv file, a directory, or a hub name like openai/gsm8k:main"
)


def read_rows(source: Any, split: str) -> Iterator[Located]:
    """Yield the rows of a file, a directory, a hub dataset or a sequence; raises DataError, usually with file and line.

    `split` selects a split of a directory, a hub dataset or a dictionary of datasets.
    """
    if isinstance(source, str | os.PathLike):
        return _named(os.fspath(source), split)
    if isinstance(source, Mapping):
        return _numbered(_split_of(source, split, "the dataset"), f"dataset[{split!r}]")
    return _numbered(source, "dataset")


def has_splits(source: Any) -> bool:
    """Return whether `source` has splits: a single file or dataset has none."""
    if not isinstance(source, str | os.PathLike):
        return isinstance(source, Mapping)
    path = Path(source).expanduser()
    if path.is_file():
        return (
            _reader(path) is _json and (text := _whole(path)).lstrip().startswith("{") and not _is_lines(text)
        )
    return not (path / "dataset_info.json").is_file() and (_has_split_directories(path) or not _mark(path))


def check_source(source: str, split: str) -> None:
    """Raise DataError for a file or directory that does not exist or cannot be read; hub datasets are not checked."""
    if Path(source).expanduser().exists() or _hub_name(source) is None:
        _named(source, split)


def _named(source: str, split: str) -> Iterator[Located]:
    path = Path(source).expanduser()
    if path.is_file():
        return _file(path, split)
    if path.is_dir():
        return _directory(path, split)
    hub = _hub_name(source)
    if hub is None:
        names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"The dataset {source!r} does not exist.{did_you_mean(path.name, names)} Accepted: {_ACCEPTED}."
        )
    return _hub(hub["name"], hub["config"], split)


def _hub_name(source: str) -> re.Match[str] | None:
    """Return the parts of a name on the hub; None for a name that looks like a file."""
    looks_like_a_file = _reader(Path(source)) is not None or source.startswith(".")
    return None if looks_like_a_file else _HUB_NAME.fullmatch(source)


def _reader(path: Path) -> Callable[[Path, str], Iterator[Located]] | None:
    return next((reader for suffix, reader in _READERS.items() if path.name.endswith(suffix)), None)


def _file(path: Path, split: str) -> Iterator[Located]:
    reader = _reader(path)
    if reader is None:
        raise DataError(f"{path}: this file type is not supported. Accepted: {', '.join(_READERS)}.")
    return _readable(path, reader(path, split))


def _readable(path: Path, rows: Iterator[Located]) -> Iterator[Located]:
    """Yield the rows of a file; raise DataError, with the place of the last row before it, for what cannot be read."""
    where = str(path)
    try:
        for where, row in rows:
            yield where, row
    except (csv.Error, EOFError, OSError, ValueError, zlib.error) as error:
        raise DataError(f"{where}: what follows cannot be read: {error}. Repair the file.") from error


def _directory(path: Path, split: str) -> Iterator[Located]:
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _saved(path, split)
    files = [path / f"{split}{suffix}" for suffix in _READERS if (path / f"{split}{suffix}").is_file()]
    shards = _shards(path, split)
    if shards and not files:
        return chain.from_iterable(_file(shard, split) for shard in shards)
    files += shards[:1]
    if not files and (mark := _mark(path)):
        return _marked(path, split, mark)
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise DataError(f"{path}: {names} both contain the split {split!r}. Set the path of one file.")
    if not files:
        names = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
        raise DataError(
            f"{path}: the split {split!r} was not found. Accepted: {split}.jsonl, {split}-00000-of-00002.parquet or the "
            f"like. The directory contains {names}."
        )
    return _file(files[0], split)


def _marked(path: Path, split: str, mark: str) -> Iterator[Located]:
    """Return the rows of directories; those of a split may be in a directory with its name."""
    if _has_split_directories(path) and not (path / split).is_dir():
        raise DataError(f"{path}: the split {split!r} was not found. Name its directory {path / split}.")
    return iter(DIRECTORIES[mark](path / split if (path / split).is_dir() else path))


def _mark(path: Path) -> str | None:
    """Return the file that makes this directory, or those at most two levels below, rows; None in one with files of rows."""
    if any(_reader(file) for split in _SPLITS for file in path.glob(f"{split}[.-]*")):
        return None
    names = (name for name in DIRECTORIES for below in ("", "*/", "*/*/") if any(path.glob(below + name)))
    return next(names, None)


def _has_split_directories(path: Path) -> bool:
    return any((path / name).is_dir() for name in _SPLITS)


def _shards(path: Path, split: str) -> list[Path]:
    """Return the files that together contain a split, named as on the hub, such as train-00000-of-00002.parquet."""
    parts = [(file, _SHARD.match(file.name.removeprefix(f"{split}-"))) for file in path.glob(f"{split}-*")]
    shards = {(int(part["number"]), int(part["of"]), part["suffix"]): file for file, part in parts if part}
    if not shards:
        return []
    kinds = {(of, suffix) for _, of, suffix in shards}
    if len(kinds) > 1 or len(shards) != max(kinds)[0]:
        names = ", ".join(sorted(file.name for file in shards.values())[:10])
        raise DataError(
            f"{path}: the shards of {split!r} are incomplete or mixed: {names}. Complete the set."
        )
    return [shards[key] for key in sorted(shards)]


def _saved(path: Path, split: str) -> Iterator[Located]:
    dataset = importlib.import_module("datasets").load_from_disk(str(path))
    return _numbered(
        _split_of(dataset, split, str(path)) if isinstance(dataset, Mapping) else dataset, str(path)
    )


def _hub(name: str, config: str | None, split: str) -> Iterator[Located]:
    datasets = importlib.import_module("datasets")
    if not hub_answers():
        datasets.config.HF_HUB_OFFLINE = True  # it reads its cache at once
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name!r} is not a local file or directory, and loading it from the hub failed: {reason}. Next step: check the "
            f"name, its config (given: {config!r}) and split (given: {split!r}), or give the path of its files."
        ) from error
    return _numbered(dataset, f"{name}:{config}" if config else name)


def _jsonl(path: Path, split: str) -> Iterator[Located]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where)
            if text.strip():
                yield where, read_json(text.rstrip(), where)


def _json(path: Path, split: str) -> Iterator[Located]:
    text = _whole(path)
    if _is_lines(text):
        return _jsonl(path, split)
    rows = read_json(text, str(path))
    if isinstance(rows, Mapping):
        rows = _split_of(rows, split, str(path))
    if not isinstance(rows, list):
        raise DataError(f"{path}: the content must be a list of rows, not {rows!r:.60}.")
    return _numbered(rows, str(path))


def _is_lines(text: str) -> bool:
    """Return whether a text is JSON lines: several lines, and the first is an object."""
    line, _, rest = text.lstrip().partition("\n")
    if not (line.startswith("{") and line.rstrip().endswith("}") and rest.strip()):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _csv(path: Path, split: str) -> Iterator[Located]:
    reader = csv.DictReader(io.StringIO(_whole(path), newline=""), restkey="", strict=True)
    names = list(reader.fieldnames or ())
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}:1: two columns have the name {twice[0]!r}. Rename or remove one of them.")
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if "" in row or None in row.values():
            raise DataError(f"{where}: the row does not have {len(names)} fields, one for each column.")
        yield where, {column: text or None for column, text in row.items()}


def _parquet(path: Path, split: str) -> Iterator[Located]:
    with importlib.import_module("pyarrow.parquet").ParquetFile(path) as file:
        rows = (arrow_row(row) for batch in file.iter_batches() for row in batch.to_pylist())
        yield from _numbered(rows, str(path))


_READERS: Mapping[str, Callable[[Path, str], Iterator[Located]]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}


def _numbered(rows: Iterable[Any], where: str) -> Iterator[Located]:
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        rows = map(arrow_row, rows)  # it stores columns with the same keys in all rows
    return ((f"{where}[{number}]", row) for number, row in enumerate(rows))


def _split_of(splits: Mapping[str, Any], split: str, where: str) -> Any:
    if split not in splits:
        raise DataError(
            f"{where}: the split {split!r} was not found. Accepted: {', '.join(map(str, splits))}."
        )
    return splits[split]


def _whole(path: Path) -> str:
    return _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = f"{where}:{line}" if line > 1 else where
        reason = f"{place}: {data[error.start :][:9]!r} is not UTF-8. Next step: convert the file."
        raise DataError(reason) from error
