"""A plan as tables for people, and as a mapping for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rl4llm.commands.output import table
from rl4llm.extensions.inspect.plan.advice import Change
from rl4llm.extensions.inspect.plan.memory import VERSIONS
from rl4llm.extensions.inspect.plan.plan import SERVER_SHARE, RunPlan


def size_text(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def tables(plan: RunPlan) -> Iterator[Table]:
    """Yield the tables of a step: from prompts to updates, and the memory of a device in each phase."""
    yield _counts(plan)
    yield _memory(plan)


def verdict(plan: RunPlan, helpful: Sequence[Change]) -> list[str]:
    """Return lines on whether the run fits, and which keys to change if it does not."""
    peak, host, total = plan.peak, list(_host(plan)), plan.counts.trajectories
    where = f"{size_text(plan.memory)} of {'this machine' if plan.device == 'cpu' else 'each device'}"
    share = f"{SERVER_SHARE:.0%} of {where}"
    if plan.fits:
        lines = [f"It fits: at most {size_text(peak.total)}, in the phase {peak.name}, in {where}."]
        if plan.served is not None:
            lines.append(
                f"With {share}, the server runs {min(plan.served, total):,} of {total:,} sequences at once."
            )
        return [*lines, *host]
    lines = [
        f"{size_text(peak.total)} in the phase {peak.name}, and {size_text(plan.room)} of {where} are available."
    ]
    if peak.total <= plan.room:
        lines = [f"with {share}, the server has no room for a sequence of {plan.counts.longest:,} tokens."]
    lines = [f"It does NOT fit: {lines[0]}"]
    for change in helpful:
        fits = "fits" if change.fits else "still too much"
        lines.append(f"  {' '.join(change.overrides)}: {size_text(change.peak)}, {fits}")
    helpless = [] if helpful else ["No single key helps: use a smaller model or more devices (--devices)."]
    return [*lines, *helpless, *host]


def _host(plan: RunPlan) -> Iterator[str]:
    """Yield what offload takes of the machine's memory, and a warning if this machine has less."""
    needed = plan.host.total * plan.devices
    if not needed:
        return
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in plan.host.parts.items())
    each = f"{size_text(plan.host.total)} for each of {plan.devices} devices"
    yield f"The machine's own memory also holds {each}: {parts}."
    # versions are on the disk where there is no room
    forced = needed - plan.devices * plan.host.parts.get(VERSIONS, 0)
    if plan.host_memory is not None and forced > plan.host_memory:
        yield f"warning: this machine has only {size_text(plan.host_memory)} of it."


def as_json(plan: RunPlan, helpful: Sequence[Change]) -> dict[str, Any]:
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
        "changes": [asdict(change) for change in helpful],
    }


def _counts(plan: RunPlan) -> Table:
    counts, ranks, config = plan.counts, plan.devices, plan.config
    factors = f"{counts.prompts * ranks:,} prompts x {counts.samples} samples"
    factors += f" x {counts.roles} roles" if counts.roles > 1 else ""
    several = f" on each of {ranks} ranks" if ranks > 1 else ""
    rows = {
        "training rows": f"{counts.rows:,} ({counts.held_out:,} held out), {counts.usual:.0f} tokens on average"
        if counts.rows
        else "",
        "sequences": f"{factors} = {counts.trajectories * ranks:,}",
        "tokens of a sequence": f"{counts.prompt_tokens:,} of the prompt + {counts.new_tokens:,} = {counts.longest:,}",
        "of them images": f"{counts.image_tokens:,}" if counts.image_tokens else "",
        "tokens that are computed": f"{counts.step_tokens * ranks:,}",
        "optimizer steps": f"{counts.updates}",
        "micro-batches of each": f"{counts.micro_batches}{several}",
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
        sizes = [f"{name} {size_text(size)}" for name, size in parts if size >= 2**20 or size == parts[0][1]]
        mark = " <- peak" if phase is plan.peak else ""
        rows.append((phase.name, f"{size_text(phase.total)}{mark}", sizes))
    title = f"memory of one device: {policy.name}, {policy.parameters:,} parameters"
    return table(title, ("phase", "bytes", "made of"), rows)
