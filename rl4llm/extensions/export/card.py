"""The model card: where a model comes from, its results, the prompt that it was trained with, and how to serve it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

import rl4llm
from rl4llm.backends.source_form import source_file
from rl4llm.config import Config
from rl4llm.core.errors import ConfigError
from rl4llm.core.redact import redacted, redacted_text
from rl4llm.envs import ENVIRONMENTS
from rl4llm.envs.tools import Functions, as_toolset
from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.tracker import read_jsonl, rounded

CARD = "README.md"
# of a path that begins at the root, or at home
DIRECTORY = re.compile(r"""(?:^|(?<=[\s'"=]))[/~][^\s'"<>]*/""")
MEASURED = ("accuracy", "reward/mean", "loss", "completion_length/mean", "turns")  # of an evaluation
LICENSE = ("license", "license_name", "license_link")
KINDS = {  # of other than language models, by the end of the class in config.json: the hub's pipeline, and the loading class
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForConditionalGeneration": ("image-text-to-text", "AutoModelForImageTextToText"),
}
QUESTION = "QUESTION"  # stands for the user's text
SERVERS = """\
vllm serve . --generation-config vllm  # in the directory of this file, or with its name on the hub
python -m sglang.launch_server --model-path . --sampling-defaults openai --port 8000
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d @request.json"""
OVER_BASE = """\
vllm serve {0} --quantization bitsandbytes --enable-lora --max-lora-rank 512 --lora-modules trained=."""
LOADS = """\
from transformers import AutoTokenizer, {0}

path = "."  # the directory of this file, or its name on the hub
tokenizer, model = AutoTokenizer.from_pretrained(path), {0}.from_pretrained(path)"""
ASKS = """
# with the request above:
inputs = tokenizer.apply_chat_template(
    request["messages"], tools=request.get("tools"), add_generation_prompt=True, return_dict=True,
    return_tensors="pt", **request.get("chat_template_kwargs", {})
)
output = model.generate(**inputs, do_sample=False, repetition_penalty=1.0, max_new_tokens=request["max_tokens"])
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def write_card(directory: Path, config: Config, step: int, run: RunDir) -> None:
    """Write the model card of a run beside the exported model."""
    source = source_file(config.model.path, CARD)
    base_card: Any = {}
    with suppress(ValueError, yaml.YAMLError):  # a card without readable metadata
        base_card = ModelCard(source.decode() if source else "").data.to_dict()
    file = directory / "config.json"  # an adapter has none
    architecture = json.loads(file.read_text())["architectures"][0] if file.is_file() else ""
    systems = _systems(run, next(iter(config.environments)))
    card = model_card(config, step, read_jsonl(run.eval_file), base_card, architecture, systems)
    card.save(directory / CARD)


def model_card(
    config: Config,
    step: int,
    evaluations: Sequence[Mapping[str, Any]] = (),
    base_card: Mapping[str, Any] | None = None,
    architecture: str = "ForCausalLM",
    systems: Mapping[str, Sequence[str]] | None = None,
) -> ModelCard:
    """Return the model card of a run after `step` steps.

    `base_card` is the metadata of the base model's card, `architecture` the class in the exported config.json, and `systems`
    the system prompts of stored episodes, by environment.
    """
    base, name, parts = shown_path(config.model.path), str(config.algorithm["name"]), config.environments
    data = ", ".join(dict.fromkeys(shown_path(part.data.path) for part in parts.values()))
    language = ("text-generation", "AutoModelForCausalLM")
    kind, loader = next((KINDS[end] for end in KINDS if architecture.endswith(end)), language)
    metadata = _origin(base, base_card or {})
    license_text = f"The base model's card states the license {metadata['license']}."
    if metadata["license"] == "unknown":
        license_text = (
            "Its license is unknown: set that of the base model, or a stricter one, before publishing."
        )
    written = dict(_references(redacted(config.values()), config.stored()))
    code = LOADS.format(loader) + (ASKS if loader == language[1] else "")
    lines = [
        f"# {base}, trained with {name}\n",
        f"{step} steps of {name} on {data}, by rl4llm {rl4llm.__version__}.",
        license_text,
        "",
        *_results([row for row in evaluations if row["step"] <= step]),
    ]
    if kind != "text-classification":
        lines += [
            "## Prompt\n",
            f"Ask as in training. This is a request to a server; {QUESTION} stands for the user's text.\n",
        ]
        for part, keys in parts.items():
            lines += [f"### {part}\n"] if part else []
            lines += _request(keys, (systems or {}).get(part, ()), written)
        lines += ["## Use\n", *_block("bash", SERVERS if architecture else OVER_BASE.format(base))]
    lines += _block("python", code)
    sections = config.stored()
    settings = {key: sections[key] for key in ("algorithm", "rollout", "training", "seed", "max_steps")}
    settings_text = DIRECTORY.sub("", yaml.safe_dump(settings, sort_keys=False)).strip()
    lines += ["## Training\n", *_block("yaml", settings_text)]
    tags = ModelCardData(library_name="transformers", pipeline_tag=kind, tags=["rl4llm", name], **metadata)
    return ModelCard("\n".join(["---", tags.to_yaml(), "---", *lines]))


def shown_path(path: str | None) -> str:
    """Return a hub name unchanged, and of a path on this machine the last part alone."""
    if path is None:
        return "prompts of the environment"
    return Path(path).name if Path(path).exists() or path.startswith((".", "/", "~")) else path


def _origin(base: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the license and the base model as metadata; for a local directory, the base model that its card names."""
    named = base if "/" in base else card.get("base_model")
    terms = {key: card[key] for key in LICENSE if isinstance(card.get(key), str)}
    link = terms.get("license_link", "")
    if link and "://" not in link:  # a file of the base model's repository
        terms["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
        if "/" not in base:
            del terms["license_link"]
    return {"license": "unknown"} | terms | ({"base_model": named} if named else {})


def _references(plain: Any, written: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts of prompts that contain variables, as the policy reads them and as they are configured."""
    for name, value in plain.items() if isinstance(plain, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _references(value, written[name])
        elif name in ("system_prompt", "prompt_template") and value and value != written[name]:
            yield value, written[name]


def _request(config: Config, systems: Sequence[str], written: Mapping[str, str]) -> Iterator[str]:
    """Yield a chat request as lines of the card, with the prompt and the sampling of training and without secrets.

    `systems` are the system prompts of stored episodes; without any, that of the configuration is used.
    """

    def shown(text: str) -> str:
        text = redacted_text(text)
        for plain, reference in written.items():
            text = text.replace(plain, reference)
        return text

    if len(systems) > 1:
        yield "The system prompt differs between prompts; this is one of them.\n"
    configured = config.data.system_prompt or config.env.get("system_prompt") or ""
    system = shown(next(filter(None, systems), "" if systems else configured))
    question = shown(config.data.prompt_template or "").replace("{prompt}", QUESTION) or QUESTION
    texts = [("system", system)] if system else []
    request: dict[str, Any] = {
        "model": ".",
        "messages": [{"role": role, "content": text} for role, text in (*texts, ("user", question))],
        "chat_template_kwargs": redacted(config.env.get("template_args") or {}),
        "tools": redacted(_tools(config)),
        "max_tokens": config.rollout.max_tokens,
        "temperature": config.eval.temperature,  # whatever generation_config.json has
        "stop": list(config.rollout.stop),
    }
    request = {key: value for key, value in request.items() if value not in ({}, [])}
    yield from _block("json", json.dumps(request, indent=2, ensure_ascii=False))


def _tools(config: Config) -> list[dict[str, Any]]:
    """Return the schemas of described functions. Do not make other sets of tools: that may start them."""
    schemas: list[dict[str, Any]] = []
    with suppress(ConfigError):  # of a class that is not installed
        defaults = inspect.signature(ENVIRONMENTS[config.env["name"]]).parameters
        items = config.env.get("tools", getattr(defaults.get("tools"), "default", ()))
        if config.env.get("describe_tools", True):
            toolsets = [as_toolset(item) for item in items or () if isinstance(item, str)]
            functions = [toolset for toolset in toolsets if isinstance(toolset, Functions)]
            schemas = [dict(tool.schema) for toolset in functions for tool in toolset.tools.values()]
    return schemas


def _systems(run: RunDir, first: str) -> dict[str, list[str]]:
    """Return the system prompts that the policy has read, by environment, from the newest file of episodes."""
    files = sorted(run.episodes_dir.glob("step-*.jsonl"))
    systems: dict[str, list[str]] = {}
    for row in read_jsonl(files[-1]) if files else ():
        opening = (row.get("messages") or [{}])[0]
        text = opening.get("content", "") if opening.get("role") == "system" else ""
        texts = systems.setdefault(row.get("part") or first, [])
        if isinstance(text, str) and text not in texts:
            texts.append(text)
    return systems


def _results(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the first and the last evaluation, as lines of a table."""
    if not rows:
        return
    yield f"| held-out set | step {rows[0]['step']} | step {rows[-1]['step']} |"
    yield "|---|---|---|"
    for name in filter(rows[-1].__contains__, MEASURED):
        yield f"| {name} | {rounded(rows[0].get(name, float('nan')))} | {rounded(rows[-1][name])} |"
    yield ""


def _block(language: str, text: str) -> list[str]:
    """Return a block of code with a fence that is longer than any in the text."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text, f"{fence}\n"]
