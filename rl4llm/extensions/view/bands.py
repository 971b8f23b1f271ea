"""Which runs are seeds of one configuration; their curves are one band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import PurePath
from typing import Any

from rl4llm.extensions.view.run import ViewedRun


def described(runs: Sequence[ViewedRun]) -> list[dict[str, Any]]:
    """Return `about` of each run with its `band`: the number of the first run of the band, and the name of the band.

    Runs are a band if their configurations differ only in `seed` and in paths, and no seed occurs twice. Directories
    are ignored, and of other paths the last part counts.
    """
    abouts = [run.about() for run in runs]
    bands: list[tuple[Any, list[int], set[Any]]] = []
    for number, about in enumerate(abouts):
        config, seed = _configuration(about["config"]), about["config"].get("seed")
        for band_config, members, seeds in bands:
            if config and config == band_config and seed not in seeds:
                members.append(number)
                seeds.add(seed)
                break
        else:
            bands.append((config, [number], {seed}))
    names = {run.name for run in runs}
    for _, members, _ in bands:
        name = _shared([runs[number].name for number in members])
        if len(members) == 1 or not name or name in names:
            name = runs[members[0]].name
        names.add(name)
        for number in members:
            abouts[number] |= {"band": members[0], "band_name": name}
    return abouts


def _configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: PurePath(value).name if key.endswith("path") and isinstance(value, str) else value
        for key, value in config.items()
        if key != "seed" and key.rpartition(".")[2] != "dir"
    }


def _shared(names: Sequence[str]) -> str:
    """Return what the names have in common, without the number of a seed.

    >>> _shared(["grpo/seed-0", "grpo/seed-1"])
    'grpo/seed'
    """
    shared = commonprefix(list(names))  # noqa: RUF071 - of characters, since the seed is the end of a part
    return shared.rstrip("-_./= 0123456789")
