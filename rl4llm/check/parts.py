"""Checks of what a user brings: data, rewards, sandbox, chat template, environment. None of them needs the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl4llm.backends.models import load_tokenizer
from rl4llm.build.data import environment_of, held_out_rows, roles_between, training_rows
from rl4llm.build.opponents import build_opponents
from rl4llm.build.options import Given, accepted_options
from rl4llm.build.trainer import build_env, build_rewards, in_part, with_hosts
from rl4llm.check.bench import Bench, NotNeeded, Part
from rl4llm.check.machine import check_remote
from rl4llm.config import by_part
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import DataError
from rl4llm.data.answers import ANSWER_COLUMNS
from rl4llm.data.render import Renderer
from rl4llm.envs.tools.tool import TOOLS
from rl4llm.rewards import REWARDS, check_examples
from rl4llm.testing import check_env


def data(bench: Bench) -> str:
    """The rows can be read, both those that train and those that are only measured."""
    learns_from = bench.algorithm.needs().learns_from
    for name, config in by_part(bench.config).items():
        in_part(name, check_remote, config)
        given = in_part(name, with_hosts, config, Given(), bench.algorithm)
        part = Part(name, config, given, in_part(name, training_rows, config, given, learns_from))
        if not len(part.dataset):
            raise DataError(f"{part.where}data.path={config.data.path!r} has no row in split {config.data.split!r}.")
        part.held_out = in_part(name, held_out_rows, config, given, learns_from)
        bench.parts.append(part)
    return "rows: " + "; ".join(
        f"{part.where}{len(part.dataset):,} to train on, {len(part.held_out or ()):,} held out" for part in bench.parts
    )


def tokenizer(bench: Bench) -> str:
    """There is a tokenizer with a pad token."""
    bench.tokenizer = load_tokenizer(bench.config.model.path, pad_token=bench.config.model.pad_token)
    return f"{len(bench.tokenizer):,} tokens, padded with {bench.tokenizer.pad_token!r}"


def rewards(bench: Bench) -> str:
    """Every reward gives its own examples what they promise."""
    bench.demand_episodes()
    for part in bench.parts:
        row = part.dataset[0]
        made = in_part(part.name, build_rewards, part.config, part.given, bench.sandbox, bench.tokenizer, row)
        part.rewards, part.transform = made
        in_part(part.name, check_examples, part.rewards)
    counts = {reward.name: _examples(reward) for part in bench.parts for reward in part.rewards}
    if not any(counts.values()):
        return f"{', '.join(counts)} can be made; none has examples of its own for such options"
    return f"{sum(counts.values())} examples hold: " + ", ".join(f"{name} {count}" for name, count in counts.items())


def _examples(reward: BaseRewardFunction) -> int:
    return len(list(reward.examples())) + sum(_examples(part) for part in reward.parts)


def environment(bench: Bench) -> str:
    """The environment keeps its contract, played without a model; see `rl4llm.testing.check_env`."""
    bench.demand_episodes()
    for part in bench.parts:
        provided = {"sandbox": bench.sandbox, "opponents": build_opponents(part.config, part.given)}
        built = (part.config, part.given, part.dataset, bench.tokenizer, part.rewards, part.transform, provided)
        part.env = in_part(part.name, build_env, *built)
        in_part(part.name, check_env, part.env)
    names = [f"{part.where}{type(part.env).__name__}" for part in bench.parts]
    return f"{', '.join(names)} keeps its contract, whatever the policy says"


def template(bench: Bench) -> str:
    """The chat template only appends: what the policy said is never rendered again."""
    if not bench.samples:
        columns = ANSWER_COLUMNS.get(bench.algorithm.needs().learns_from, ())
        (part,) = bench.parts
        part.renderer = Renderer(bench.tokenizer, roles=roles_between(part.dataset, columns))
        return _template_text(part.renderer, bench)
    renderers = [_renderer(part, bench.tokenizer) for part in bench.parts]
    return _template_text(renderers[0], bench)


def _renderer(part: Part, tokenizer: Any) -> Renderer:
    env = part.env
    assert env is not None  # of a check that this one needs
    part.renderer = in_part(
        part.name, Renderer, tokenizer, env.tool_schemas, env.reply_roles if env.max_steps > 1 else ()
    )
    return part.renderer


def _template_text(renderer: Renderer, bench: Bench) -> str:
    ends = ", ".join(repr(token) for token in bench.tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids)))
    return f"made-up conversations were extended token for token; a turn ends with {ends}"


def sandbox(bench: Bench) -> str:
    """Programs of the policy reach nothing of the machine, where the run has any."""
    bench.demand_episodes()
    if not any(_runs_programs(part) for part in bench.parts):
        raise NotNeeded("no reward, tool or environment of this run runs programs")
    return str(bench.sandbox.probe())


def _runs_programs(part: Part) -> bool:
    """Whether one of its rewards or tools, or an environment without tools, takes the sandbox of the run."""
    env_class = environment_of(part.config, part.given)
    if part.given.hosted:  # hosts have sandboxes of their own
        return False
    named = env_class.default_rewards if part.config.rewards is None else part.config.rewards
    made = [REWARDS[name] for name in _names(named)]
    if "tools" in accepted_options(env_class):
        made += [TOOLS[name] for name in _names(part.config.env.get("tools") or ())]
    else:
        made.append(env_class)
    return any("sandbox" in accepted_options(item) for item in made)


def _names(specs: Iterable[Any]) -> Iterator[str]:
    """What rewards or tools are called, those inside of others too."""
    for spec in specs:
        if isinstance(spec, Mapping):
            yield spec["name"]
            yield from _names(item for item in spec.values() if isinstance(item, Mapping) and "name" in item)
        else:
            yield spec
