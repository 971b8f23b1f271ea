"""A plan as tables for people, and as a mapping for scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rl4llm.commands.output import table
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.inspect.plan.advice import Change
from rl4llm.extensions.inspect.plan.memory import VERSIONS
from rl4llm.extensions.inspect.plan.plan import SERVER_SHARE, RunPlan

BASES = {"B": 1000, "IB": 1024}
UNITS = {f"{letter}{unit}": BASES[unit] ** power for power, letter in enumerate("KMGT", 1) for unit in BASES}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 24GiB. Raises ConfigError for anything else.

    >>> parse_size("1.5 GiB")
    1610612736
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not size:
        raise ConfigError(
            f"--device-memory {text!r} is not accepted. Accepted: a number and a unit, such as 24GiB or 80GB."
        )
    return size


def size_text(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def tables(plan: RunPlan) -> Iterator[Table]:
    """Yield the tables of a step: from prompts to updates, and the memory of a device in each phase."""
    yield _counts(plan)
    yield _memory(plan)


def verdict(plan: RunPlan, found: Sequence[Change]) -> list[str]:
    """Return lines on whether the run fits, and which keys to change if it does not."""
    peak, where = (
        plan.peak,
        f"{size_text(plan.memory)} of {'this machine' if plan.device == 'cpu' else 'each device'}",
    )
    host = list(_host(plan))
    if plan.fits:
        lines = [f"It fits: at most {size_text(peak.total)}, in the phase {peak.name}, in {where}."]
        if plan.served is not None:
            played = plan.counts.trajectories
            held = f"{plan.served:,} of {played:,}" if plan.served < played else f"all {played:,}"
            lines.append(
                f"With {SERVER_SHARE:.0%} of the device, the server runs {held} sequences of the maximum length at once."
            )
        return [*lines, *host]
    room = f"{size_text(plan.room)} of {where} are available"
    lines = [f"It does NOT fit: {size_text(peak.total)} in the phase {peak.name}, but {room}."]
    if peak.total <= plan.room:
        lines = [
            f"It does NOT fit: with {SERVER_SHARE:.0%} of {where}, the server has no room for one sequence of the maximum "
            f"length, {plan.counts.longest:,} tokens, beside its weights."
        ]
    for change in found:
        fits = "fits" if change.fits else "still too much"
        lines.append(f"  {' '.join(change.overrides)}: {size_text(change.peak)}, {fits}")
    helpless = [] if found else ["No single key helps: use a smaller model or more devices (--devices)."]
    return [*lines, *helpless, *host]


def _host(plan: RunPlan) -> Iterator[str]:
    """Yield what offload takes of the machine's memory, and a warning if this machine has less."""
    each, needed = plan.host.total, plan.host.total * plan.devices
    if not each:
        return
    of = ", ".join(f"{name} {size_text(size)}" for name, size in plan.host.parts.items())
    several = (
        f" for each device, {size_text(needed)} for {plan.devices} on one machine" if plan.devices > 1 else ""
    )
    yield f"The machine's own memory also holds {size_text(each)}{several}: {of}."
    # versions are on the disk where there is no room
    forced = needed - plan.devices * plan.host.parts.get(VERSIONS, 0)
    if plan.host_memory is not None and forced > plan.host_memory:
        yield f"warning: this machine has only {size_text(plan.host_memory)} of it."


def as_json(plan: RunPlan, found: Sequence[Change]) -> dict[str, Any]:
    """Return the whole plan, in bytes and tokens."""
    return {
        "fits": plan.fits,
        "peak": {"phase": plan.peak.name, "bytes": plan.peak.total},
        "room": plan.room,
        "device": {"kind": plan.device, "count": plan.devices, "bytes": plan.memory},
        "model": asdict(plan.models.policy),
        "counts": {
            **asdict(plan.counts),
            "trajectories": plan.counts.trajectories,
            "longest": plan.counts.longest,
        },
        "steps": plan.config.max_steps,
        "served": plan.served,
        "host": {"bytes": plan.host.total, "has": plan.host_memory, **plan.host.parts},
        "phases": {phase.name: {"total": phase.total, **phase.parts} for phase in plan.phases},
        "changes": [asdict(change) for change in found],
    }


def _counts(plan: RunPlan) -> Table:
    counts, ranks, config = plan.counts, plan.devices, plan.config
    played = f"{counts.prompts * ranks:,} prompts x {counts.samples} samples"
    played += f" x {counts.roles} roles" if counts.roles > 1 else ""
    rows = {
        "training rows": f"{counts.rows:,} ({counts.held_out:,} held out), {counts.usual:.0f} tokens on average",
        "sequences": f"{played} = {counts.trajectories * ranks:,}",
        "tokens of a sequence": f"{counts.prompt_tokens:,} of the prompt + {counts.new_tokens:,} = {counts.longest:,}",
        "of them images": f"{counts.image_tokens:,}" if counts.image_tokens else "",
        "tokens that are computed": f"{counts.step_tokens * ranks:,}",
        "optimizer steps": f"{counts.updates}",
        "micro-batches of each": f"{counts.micro_batches}"
        + (f" on each of {ranks} ranks" if ranks > 1 else ""),
        "tokens of a micro-batch": f"{counts.padded:,}",
        "in the whole run": f"{config.max_steps:,} steps, {config.max_steps * counts.updates:,} optimizer steps, "
        f"{config.max_steps * counts.trajectories * ranks:,} sequences",
    }
    title = f"a step, at most, on {ranks} device{'s' if ranks > 1 else ''}"
    return table(title, ("what", "how many"), [(what, value) for what, value in rows.items() if value])


def _memory(plan: RunPlan) -> Table:
    policy = plan.models.policy
    rows = []
    for phase in plan.phases:
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        named = ", ".join(
            f"{name} {size_text(size)}" for name, size in parts if size >= 2**20 or size == parts[0][1]
        )
        mark = " <- peak" if phase is plan.peak else ""
        rows.append((phase.name, f"{size_text(phase.total)}{mark}", named))
    title = f"memory of one device: {policy.name}, {policy.parameters:,} parameters"
    return table(title, ("phase", "bytes", "made of"), rows)
