"""Rows as they are stored: files, directories, the hub. Each comes with the place that an error can point at."""

from __future__ import annotations

import csv
import difflib
import gzip
import importlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rl4llm.core.errors import DataError
from rl4llm.core.hub import hub_answers

Located = tuple[str, Any]
"""Where a row stands ("train.jsonl:17"), and the row."""

_SHARD = re.compile(r"(?P<number>\d+)-of-(?P<of>\d+)(?P<suffix>\.[a-z.]+)$")
_HUB_NAME = re.compile(r"(?P<name>[\w.\-]+/[\w.\-]+)(:(?P<config>[\w.\-]+))?")
_ACCEPTED = "a .jsonl, .jsonl.gz, .json, .parquet or .csv file, a directory, or a hub name like openai/gsm8k:main"


def read_rows(source: Any, split: str) -> Iterator[Located]:
    """The rows of a file, a directory, a hub dataset, or of a sequence of rows; raises DataError, most with file and line.

    `split` chooses among the splits of a directory, a hub dataset or a dictionary of datasets.
    """
    if isinstance(source, str | os.PathLike):
        return _named(os.fspath(source), split)
    if isinstance(source, Mapping):
        return _numbered(_split_of(source, split, "the dataset"), f"dataset[{split!r}]")
    if not isinstance(source, Iterable):
        raise DataError(f"A dataset of type {type(source).__name__} is not accepted. Accepted: rows, or {_ACCEPTED}.")
    return _numbered(source, "dataset")


def has_splits(source: Any) -> bool:
    """Whether `source` is read differently for another split: not a single file or dataset, whose rows are all there is."""
    if not isinstance(source, str | os.PathLike):
        return isinstance(source, Mapping)
    path = Path(source).expanduser()
    if path.is_file():
        return _reader(path) is _json and _whole(path).lstrip().startswith("{")
    return not (path / "dataset_info.json").is_file()


def _named(source: str, split: str) -> Iterator[Located]:
    path = Path(source).expanduser()
    if path.is_file():
        return _file(path, split)
    if path.is_dir():
        return _directory(path, split)
    hub = _HUB_NAME.fullmatch(source)
    if hub is None or _reader(path) is not None or source.startswith("."):
        raise DataError(f"The dataset {source!r} does not exist.{_close_name(path)} Accepted: {_ACCEPTED}.")
    return _hub(hub["name"], hub["config"], split)


def _reader(path: Path) -> Callable[[Path, str], Iterator[Located]] | None:
    return next((read for suffix, read in _READERS.items() if path.name.endswith(suffix)), None)


def _file(path: Path, split: str) -> Iterator[Located]:
    read = _reader(path)
    if read is None:
        raise DataError(f"{path}: files of this kind cannot be read. Accepted: {', '.join(_READERS)}.")
    return read(path, split)


def _directory(path: Path, split: str) -> Iterator[Located]:
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _saved(path, split)
    found = [path / f"{split}{suffix}" for suffix in _READERS if (path / f"{split}{suffix}").is_file()]
    shards = _shards(path, split)
    if shards and not found:
        return chain.from_iterable(_file(shard, split) for shard in shards)
    found += shards[:1]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise DataError(f"{path}: {names} both hold the split {split!r}. Next step: name the file itself.")
    if not found:
        there = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
        accepted = f"{split}.jsonl (or {', '.join(_READERS)}), and no {split}-00000-of-00002.parquet and so on"
        raise DataError(f"{path}: there is no {accepted}; it holds {there}.")
    return _file(found[0], split)


def _shards(path: Path, split: str) -> list[Path]:
    """Files that hold a split together, named as on the hub: train-00000-of-00002.parquet. All must be there."""
    parts = [(file, _SHARD.match(file.name.removeprefix(f"{split}-"))) for file in path.glob(f"{split}-*")]
    shards = {(int(part["number"]), int(part["of"]), part["suffix"]): file for file, part in parts if part}
    if not shards:
        return []
    kinds = {(of, suffix) for _, of, suffix in shards}
    if len(kinds) > 1 or len(shards) != max(kinds)[0]:
        names = ", ".join(sorted(file.name for file in shards.values())[:10])
        raise DataError(f"{path}: of the files of the split {split!r} some are missing, or belong to others: {names}.")
    return [shards[key] for key in sorted(shards)]


def _saved(path: Path, split: str) -> Iterator[Located]:
    datasets = importlib.import_module("datasets")
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: the saved dataset cannot be read: {_first_line(error)}") from error
    return _numbered(_split_of(dataset, split, str(path)) if isinstance(dataset, Mapping) else dataset, str(path))


def _hub(name: str, config: str | None, split: str) -> Iterator[Located]:
    datasets = importlib.import_module("datasets")
    if not hub_answers():
        datasets.config.HF_HUB_OFFLINE = True  # it looks into its cache at once
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"The dataset {name!r} is no file or directory here, and loading it from the hub failed: {_first_line(error)}. "
            f"Next step: check the name, its config (given: {config!r}, as in {name}:main) and split (given: {split!r}), or "
            "download it elsewhere and give the path of its files."
        ) from error
    return _numbered(dataset, f"{name}:{config}" if config else name)


def _jsonl(path: Path, split: str) -> Iterator[Located]:
    for where, line in _lines(path):
        text = _decode(line, where)
        if text.strip():
            yield where, _parse(text.rstrip(), where)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    where = str(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                yield where, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read beyond {where}: {error}. Is the file complete?") from error


def _json(path: Path, split: str) -> Iterator[Located]:
    rows = _parse(_whole(path), str(path))
    if isinstance(rows, Mapping):
        rows = _split_of(rows, split, str(path))
    if not isinstance(rows, list):
        raise DataError(f"{path}: a .json file must hold a list of rows, or a list by split; this is {_kind(rows)}.")
    return _numbered(rows, str(path))


def _csv(path: Path, split: str) -> Iterator[Located]:
    reader = csv.DictReader(io.StringIO(_whole(path), newline=""), restkey="", strict=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if "" in row or None in row.values():
                columns = len(reader.fieldnames or ())
                raise DataError(f"{where}: this row has more or fewer fields than the {columns} columns.")
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}.") from error


def _parquet(path: Path, split: str) -> Iterator[Located]:
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from _numbered(rows, str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a valid Parquet file: {_first_line(error)}.") from error


_READERS: Mapping[str, Callable[[Path, str], Iterator[Located]]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}


def _numbered(rows: Iterable[Any], where: str) -> Iterator[Located]:
    return ((f"{where}[{number}]", row) for number, row in enumerate(rows))


def _split_of(splits: Mapping[str, Any], split: str, where: str) -> Any:
    if split not in splits:
        raise DataError(f"{where}: there is no split {split!r}; it has {', '.join(map(str, splits)) or 'none'}.")
    return splits[split]


def _whole(path: Path) -> str:
    try:
        return _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}.") from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        lines = data.count(b"\n", 0, error.start)
        line = f", {lines} lines below" if lines else ""
        raise DataError(
            f"{where}: byte {error.start}{line} (0x{data[error.start]:02x}) is not UTF-8. Next step: convert the file, "
            "for example with iconv -f latin1 -t utf-8."
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = where if error.lineno == 1 else f"{where}:{error.lineno}"
        raise DataError(f"{place}: not valid JSON at column {error.colno}: {error.msg}: {text[:60]!r}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not readable as JSON: {error}.") from error


def _close_name(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir()]
    except OSError:
        return f" There is no directory {str(path.parent)!r} either."
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {str(path.parent / close[0])!r}?" if close else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _kind(value: Any) -> str:
    return type(value).__name__
