"""A plan for people, as tables, and for scripts, as a mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rl4llm.core.errors import ConfigError
from rl4llm.plan.advice import Change
from rl4llm.plan.plan import Plan

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a text such as 24GiB; raises ConfigError for anything else.

    >>> parse_size("1.5 GiB")
    1610612736
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not size:
        raise ConfigError(f"--device-memory {text!r} is not accepted: a number and a unit, such as 24GiB or 80GB.")
    return size


def size_text(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def tables(plan: Plan) -> Iterator[Table]:
    """How prompts become updates, and what is on a device in each phase."""
    yield _counts(plan)
    yield _memory(plan)


def verdict(plan: Plan, found: Sequence[Change]) -> list[str]:
    """Whether it fits, and which keys to change where it does not."""
    peak, where = plan.peak, f"{size_text(plan.memory)} of {'this machine' if plan.device == 'cpu' else 'each device'}"
    if plan.fits:
        return [f"It fits: at most {size_text(peak.total)}, in the phase {peak.name}, in {where}."]
    room = f"{size_text(plan.room)} of {where} are for it"
    lines = [f"It does NOT fit: {size_text(peak.total)} in the phase {peak.name}, and {room}."]
    lines += [_line(change) for change in found]
    return lines if found else [*lines, "No single key helps: take a smaller model, or more devices (--devices)."]


def as_json(plan: Plan, found: Sequence[Change]) -> dict[str, Any]:
    """All of it, in bytes and tokens."""
    return {
        "fits": plan.fits,
        "peak": {"phase": plan.peak.name, "bytes": plan.peak.total},
        "room": plan.room,
        "device": {"kind": plan.device, "count": plan.devices, "bytes": plan.memory},
        "model": asdict(plan.models.policy),
        "counts": {**asdict(plan.counts), "trajectories": plan.counts.trajectories, "longest": plan.counts.longest},
        "steps": plan.config.max_steps,
        "phases": {phase.name: {"total": phase.total, **phase.parts} for phase in plan.phases},
        "changes": [asdict(change) for change in found],
    }


def _line(change: Change) -> str:
    return f"  {' '.join(change.overrides)}: {size_text(change.peak)}, {'fits' if change.fits else 'still too much'}"


def _counts(plan: Plan) -> Table:
    counts, ranks, config = plan.counts, plan.devices, plan.config
    table = Table("what", "how many", title=f"a step, at most, on {ranks} device{'s' if ranks > 1 else ''}")
    played = f"{counts.prompts * ranks:,} prompts x {counts.samples} samples"
    played += f" x {counts.roles} roles" if counts.roles > 1 else ""
    rows = {
        "training rows": f"{counts.rows:,} ({counts.held_out:,} held out), {counts.usual:.0f} tokens on average",
        "sequences": f"{played} = {counts.trajectories * ranks:,}",
        "tokens of a sequence": f"{counts.prompt_tokens:,} of the prompt + {counts.new_tokens:,} = {counts.longest:,}",
        "tokens that are computed": f"{counts.step_tokens * ranks:,}",
        "optimizer steps": f"{counts.updates}",
        "micro-batches of each": f"{counts.micro_batches}" + (f" on each of {ranks} ranks" if ranks > 1 else ""),
        "tokens of a micro-batch": f"{counts.padded:,}",
        "in the whole run": f"{config.max_steps:,} steps, {config.max_steps * counts.updates:,} optimizer steps, "
        f"{config.max_steps * counts.trajectories * ranks:,} sequences",
    }
    for what, value in rows.items():
        table.add_row(what, value)
    return table


def _memory(plan: Plan) -> Table:
    policy = plan.models.policy
    table = Table(
        "phase", "bytes", "of which", title=f"memory of one device: {policy.name}, {policy.parameters:,} parameters"
    )
    for phase in plan.phases:
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {size_text(size)}" for name, size in parts if size >= 2**20 or size == parts[0][1])
        mark = " <- peak" if phase is plan.peak else ""
        table.add_row(phase.name, f"{size_text(phase.total)}{mark}", named)
    return table
