"""The model card: where a model comes from, the prompt that it was trained with, its results, and how to serve it."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

import rl4llm
from rl4llm.backends.source_form import source_file
from rl4llm.config import Config, as_written, by_part
from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import HIDDEN, redacted, redacted_text
from rl4llm.envs import ENVIRONMENTS
from rl4llm.envs.tools import Functions, as_toolset
from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.tracker import read_jsonl, rounded

CARD = "README.md"
# of a path that begins at the root, or at home
DIRECTORY = re.compile(r"""(?:^|(?<=[\s'"=]))[/~][^\s'"<>]*/""")
TOLD = ("accuracy", "reward/mean", "loss", "completion_length/mean", "turns")  # of an evaluation
LICENSE = ("license", "license_name", "license_link")
PLAIN = "AutoModelForCausalLM"
KINDS = {  # of other than language models, by the end of the class in config.json: the hub's pipeline, and the loading class
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForConditionalGeneration": ("image-text-to-text", "AutoModelForImageTextToText"),
}
FREE = "QUESTION"  # stands for the user's text


@dataclass(frozen=True, slots=True)
class Prompt:
    """What stood before and around each question of an environment in training, without secrets.

    `systems` are the system prompts that occurred, and "" stands for none; None if nothing is known about them.
    `tools` are the schemas of tools that prompts described, and `tool_names` the names of all tools.
    """

    systems: Sequence[str] | None
    template: str
    template_args: Mapping[str, Any]
    tool_names: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    described: bool

    @classmethod
    def of(cls, config: Config, systems: Sequence[str] | None, shown: Callable[[str], str]) -> Prompt:
        """Return the prompt of a configuration; `systems` are those of stored episodes, and `shown` hides secrets."""
        if systems is None and (system := config.data.system_prompt or _option(config, "system_prompt")):
            systems = [system]
        names, schemas = _tools(_option(config, "tools") or ())
        described = bool(names) and _option(config, "describe_tools") is not False
        return cls(
            systems=None if systems is None else [shown(text) for text in systems],
            template=shown(config.data.prompt_template or ""),
            template_args=redacted(config.env.get("template_args") or {}),
            tool_names=names,
            tools=redacted(schemas) if described else (),
            described=described,
        )

    def lines(self) -> Iterator[str]:
        """Yield the lines of the card."""
        if self.systems is None:
            yield "- System prompt: that of the rows of the dataset, if they have one."
        elif not any(self.systems):
            yield "- System prompt: none."
        elif len(self.systems) > 1:
            yield "- System prompt: it differs between prompts; this is one of them."
        else:
            yield "- System prompt:"
        yield from ("", *_block("text", self._system), "") if self._system else ()
        if self.template:
            yield from ("- Prompt template:", "", *_block("text", self.template), "")
        if self.template_args:
            yield f"- Chat template arguments: `{json.dumps(self.template_args, ensure_ascii=False)}`"
        if self.tool_names:
            names = ", ".join(self.tool_names)
            shown = "described in the prompt" if self.described else "not described in the prompt: pass none"
            yield f"- Tools: {names}; {shown}."

    def messages(self) -> list[dict[str, str]]:
        """Return the messages of a request with a placeholder for the user's text."""
        asked = self.template.replace("{prompt}", FREE) or FREE
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": asked}]

    @property
    def _system(self) -> str:
        return next(filter(None, self.systems or ()), "")


def write_card(directory: Path, config: Config, step: int, run: RunDir) -> None:
    """Write the model card of a run beside the exported model."""
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    source = source_file(config.model.path, CARD)
    card = model_card(
        config,
        step,
        read_jsonl(run.eval_file),
        base_card=front_matter(source.decode() if source else ""),
        architecture=architecture,
        systems=_systems(run, list(by_part(config))),
    )
    (directory / CARD).write_text(card, encoding="utf-8")


def model_card(
    config: Config,
    step: int,
    evaluations: Sequence[Mapping[str, Any]],
    *,
    base_card: Mapping[str, Any] | None = None,
    architecture: str = "ForCausalLM",
    systems: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the model card of a run after `step` steps.

    `base_card` is the metadata of the base model's card, `architecture` the class in the exported config.json, and `systems`
    the system prompts of stored episodes, by environment.
    """
    base, name = shown_path(config.model.path), str(config.algorithm["name"])
    parts = by_part(config)
    learned_from = dict.fromkeys(shown_path(part.data.path) for part in parts.values())
    kind, loader = next(
        (KINDS[end] for end in KINDS if architecture.endswith(end)), ("text-generation", PLAIN)
    )
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": kind,
        "tags": ["rl4llm", name],
    }
    metadata |= _origin(base, base_card or {})
    generates = kind != "text-classification"
    shown = _hiding(config)
    prompts = {part: Prompt.of(keys, (systems or {}).get(part), shown) for part, keys in parts.items()}
    return "\n".join(
        [
            "---",
            yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).strip(),
            "---",
            f"# {base}, trained with {name}",
            "",
            f"{step} steps of {name} on {', '.join(learned_from)}, by rl4llm {rl4llm.__version__}.",
            "Its license is unknown: set `license` above to that of the base model, or a stricter one, before publishing."
            if metadata["license"] == "unknown"
            else f"The base model's card states the license {metadata['license']}.",
            "",
            *_results([row for row in evaluations if row["step"] <= step]),
            *(_prompts(prompts) if generates else ()),
            "## Use",
            "",
            *(_serving(config, next(iter(prompts.values())), loader) if generates else _loading(loader)),
            "## Configuration",
            "",
            *_block("yaml", OmegaConf.to_yaml(_told(as_written(_without_places(config)))).strip()),
            "",
        ]
    )


def front_matter(card: str) -> dict[str, Any]:
    """Return the metadata of a model card, {} if it has none that can be read."""
    found = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        metadata = None
    return metadata if isinstance(metadata, dict) else {}


def shown_path(path: str | None) -> str:
    """Return a hub name unchanged, and of a path on this machine the last part alone."""
    if path is None:
        return "prompts of the environment"
    return Path(path).name if Path(path).exists() or path.startswith((".", "/", "~")) else path


def _origin(base: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the license and the base model as metadata; for a local directory, the base model that its card names."""
    named = base if "/" in base else card.get("base_model")
    found = {key: card[key] for key in LICENSE if isinstance(card.get(key), str)}
    link = found.get("license_link", "")
    if link and "://" not in link:  # a file of the base model's repository
        found["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
        if "/" not in base:
            del found["license_link"]
    return {"license": "unknown"} | found | ({"base_model": named} if named else {})


def _hiding(config: Config) -> Callable[[str], str]:
    """Return a function that hides the secrets of a text, also those that references have put into prompts."""
    written, plain = as_written(config), as_written(replace(config, references={}))
    pairs = list(_texts(plain, written))

    def shown(text: str) -> str:
        text = redacted_text(text)
        for found, reference in pairs:
            text = text.replace(found, reference)
        return text

    return shown


def _texts(plain: Any, written: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts of prompts whose written form differs, with that form."""
    for name, value in plain.items() if isinstance(plain, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _texts(value, written[name])
        elif name in ("system_prompt", "prompt_template") and value and value != written[name]:
            yield value, written[name]


def _option(config: Config, name: str) -> Any:
    """Return an option of the environment or of its prompts as configured, else its default; None without such an option."""
    if name in config.env:
        return config.env[name]
    with suppress(ConfigError):  # of a class that is not installed
        env_class: Any = ENVIRONMENTS[config.env["name"]]
        for made in filter(None, (env_class, env_class.prompts if config.data.path is None else None)):
            found = inspect.signature(made).parameters.get(name)
            if found is not None and found.default is not found.empty:
                return found.default
    return None


def _tools(items: Sequence[Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of tools, and the schemas of functions. Do not make other sets of tools: that may start them."""
    names, schemas = [], []
    for item in items:
        name = item.get("name") if isinstance(item, Mapping) else item
        toolset = None
        with suppress(ConfigError):
            toolset = as_toolset(item) if isinstance(item, str) else None
        if isinstance(toolset, Functions):
            names += list(toolset.tools)
            schemas += [dict(tool.schema) for tool in toolset.tools.values()]
        else:
            names.append(str(name))
    return names, schemas


def _systems(run: RunDir, parts: Sequence[str]) -> dict[str, list[str]]:
    """Return the system prompts that the policy has read, by environment, from the newest file of episodes."""
    files = sorted(run.episodes_dir.glob("step-*.jsonl"))
    found: dict[str, list[str]] = {}
    for row in read_jsonl(files[-1]) if files else ():
        messages = row.get("messages") or [{}]
        system = messages[0].get("content", "") if messages[0].get("role") == "system" else ""
        known = found.setdefault(row.get("part") or parts[0], [])
        if isinstance(system, str) and system not in known:
            known.append(system)
    return found


def _results(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the first and the last evaluation, as lines of a table."""
    if not rows:
        return
    names = [name for name in TOLD if name in rows[-1]]
    yield "| held-out set | " + " | ".join(f"step {row['step']}" for row in (rows[0], rows[-1])) + " |"
    yield "|---|---|---|"
    for name in names:
        yield f"| {name} | {rounded(rows[0].get(name, float('nan')))} | {rounded(rows[-1][name])} |"
    yield ""


def _prompts(prompts: Mapping[str, Prompt]) -> Iterator[str]:
    yield from ("## Prompt", "", "The model was trained with this prompt. Use the same.", "")
    for part, prompt in prompts.items():
        yield from ((f"### {part}", "") if part else ())
        yield from (*prompt.lines(), "")


def _loading(loader: str) -> list[str]:
    code = [
        f"from transformers import AutoTokenizer, {loader}",
        "",
        'path = "."  # the directory of this file, or its name on the hub',
        f"tokenizer, model = AutoTokenizer.from_pretrained(path), {loader}.from_pretrained(path)",
    ]
    return [*_block("python", "\n".join(code)), ""]


def _serving(config: Config, prompt: Prompt, loader: str) -> Iterator[str]:
    """Commands of servers and a request; sampling is that of training, whatever generation_config.json has."""
    messages, arguments = prompt.messages(), prompt.template_args
    request = {"model": ".", "messages": messages, "max_tokens": config.rollout.max_tokens}
    request |= {"temperature": config.eval.temperature}
    request |= {"stop": list(config.rollout.stop)} if config.rollout.stop else {}
    request |= {"chat_template_kwargs": arguments} if arguments else {}
    request |= {"tools": prompt.tools} if prompt.tools else {}
    servers = [
        "vllm serve . --generation-config vllm  # in the directory of this file, or with its name on the hub",
        "python -m sglang.launch_server --model-path . --sampling-defaults openai --port 8000",
    ]
    body = json.dumps(request, ensure_ascii=False)
    call = f"curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    yield from (*_block("bash", "\n".join(servers)), "", "One of these serves it. A request:", "")
    yield from (*_block("bash", call), "")
    if prompt.described:
        yield (
            "Servers parse tool calls with `--tool-call-parser NAME` (vLLM also needs `--enable-auto-tool-choice`); NAME is "
            "the format of the model's family."
        )
        yield ""
    if loader != PLAIN:
        yield from ("With transformers:", "", *_loading(loader))
        return
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    options |= {"tools": list(prompt.tools)} if prompt.tools else {}
    limit = config.rollout.max_tokens
    code = [
        f"messages = {messages!r}",
        f"inputs = tokenizer.apply_chat_template(messages, **{options!r})",
        f"output = model.generate(**inputs, do_sample=False, repetition_penalty=1.0, max_new_tokens={limit})",
        "print(tokenizer.decode(output[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True))",
    ]
    yield from ("With transformers:", "", *_loading(loader)[:-2], *code, "```", "")


def _block(language: str, text: str) -> list[str]:
    """Return a block of code with a fence that is longer than any in the text."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text, fence]


def _without_places(config: Config) -> Config:
    """Return the configuration without what is specific to this machine."""
    return replace(
        config,
        model=replace(config.model, path=shown_path(config.model.path)),
        data=replace(config.data, path=None if config.data.path is None else shown_path(config.data.path)),
        eval=replace(config.eval, path=None if config.eval.path is None else shown_path(config.eval.path)),
        sync=replace(config.sync, dir=None),
        inference={"name": config.inference["name"]},
        output=replace(config.output, dir=Path(config.output.dir).name),
    )


def _told(value: Any) -> Any:
    """Remove from a configuration what else could give access: variables of programs, addresses, directories."""
    if isinstance(value, Mapping):
        # addresses, a program's variables
        hidden = ("remote", "url", "env") if "command" in value else ("remote", "url")
        return {key: HIDDEN if key in hidden and item else _told(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_told(item) for item in value]
    return DIRECTORY.sub("", value) if isinstance(value, str) else value
