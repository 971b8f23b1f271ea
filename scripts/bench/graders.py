"""Compare graders of mathematics on the same answers: what each one accepts and refuses.

    python scripts/bench/graders.py
    python scripts/bench/graders.py --python math-verify=MV/bin/python --python trl=TRL/bin/python \\
        --python inspect-ai=INSPECT/bin/python --python hendrycks_math=LM/bin/python --python minerva_math=LM/bin/python
    python scripts/bench/graders.py --mistakes rl4llm

A grader runs in the environment that `--python` names, or else in this one if its package is installed here, or else not at
all. The environments:

    MV       math-verify
    TRL      torch trl math-verify
    INSPECT  inspect-ai latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2
    LM       datasets math-verify antlr4-python3-runtime==4.11.0, then `pip install --no-deps lm-eval`

A row of `graders.jsonl` has a reply, a ground truth, a kind, and whether the reply is right. Each grader finds the answer in
the reply itself. The tasks of lm-eval look for one only in the form that their prompts ask for, so here they take the last
box where there is one. A cell "1, 2" counts 1 right answer refused and 2 wrong ones accepted. Answers without a verdict, as
where the grader cannot parse the ground truth, are counted in another line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import parser_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("graders.jsonl")
CHOICE = "matter of choice"
PATIENCE_S = 60  # a busy machine must not decide

Row = dict[str, Any]
Verdicts = list[bool | None]


def main() -> int:
    """Run each grader that is available in its own process and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--python", action="append", default=[], metavar="GRADER=PATH", help=f"one of {', '.join(GRADERS)}"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="the answers, one JSON object in each line")
    parser.add_argument("--mistakes", metavar="GRADER", help="also print the rows that it gets wrong")
    parser.add_argument("--grade", choices=GRADERS, help=argparse.SUPPRESS)  # the process of one grader
    options = parser.parse_args()
    if options.grade:
        return answer(options.grade)
    pythons = dict(item.partition("=")[::2] for item in options.python)
    if unknown := sorted({*pythons, options.mistakes or "rl4llm"} - set(GRADERS)):
        parser.error(f"{', '.join(unknown)} is unknown. Graders: {', '.join(GRADERS)}.")
    rows = [json.loads(line) for line in options.rows.read_text("utf-8").splitlines()]
    found = {name: pythons.get(name) or here(name) for name in GRADERS}
    missing = [name for name, python in found.items() if not python]
    results = {name: ask(name, python, rows) for name, python in found.items() if python}
    print("\n".join(table(rows, results)))
    if missing:
        print(f"\nNot installed: {', '.join(missing)}. See --python.")
    for row, verdict in zip(rows, results.get(options.mistakes, ("", []))[1], strict=False):
        if verdict is not row["right"]:
            print(json.dumps({**row, "verdict": verdict}, ensure_ascii=False))
    return 0


def here(name: str) -> str | None:
    """Return this Python if the package of a grader is installed in it."""
    package = GRADERS[name][0]
    return sys.executable if importlib.util.find_spec(package.replace("-", "_")) else None


def ask(name: str, python: str, rows: list[Row]) -> tuple[str, Verdicts]:
    """Return the version of a grader and its verdicts, from a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if name == "rl4llm" else dict(os.environ)
    command = [python, __file__, "--grade", name]
    done = subprocess.run(
        command, input=json.dumps(rows), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    result = json.loads(done.stdout)
    return result["version"], result["verdicts"]


def answer(name: str) -> int:
    """Grade the rows of stdin; what libraries print goes to stderr."""
    to_driver = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    package, grade = GRADERS[name]
    rows = json.load(sys.stdin)
    json.dump({"version": importlib.metadata.version(package), "verdicts": grade(rows)}, to_driver)
    to_driver.close()
    return 0


def table(rows: list[Row], results: dict[str, tuple[str, Verdicts]]) -> list[str]:
    """Return a Markdown table: a line for each kind, the totals, and the answers without a verdict if there are any."""
    heads = [f"{name} {version}" for name, (version, _) in results.items()]
    lines = [f"| kind | right, wrong | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    chosen = {kind: {kind} for kind in kinds} | {"all but matters of choice": {*kinds} - {CHOICE}}
    for label, members in chosen.items():
        mine = [index for index, row in enumerate(rows) if row["kind"] in members]
        right = sum(rows[index]["right"] for index in mine)
        cells = [mistakes(rows, verdicts, mine) for _, verdicts in results.values()]
        lines.append(f"| {label} | {right}, {len(mine) - right} | {' | '.join(cells)} |")
    silent = [verdicts.count(None) for _, verdicts in results.values()]
    return [*lines, f"| without a verdict | | {' | '.join(map(str, silent))} |"] if any(silent) else lines


def mistakes(rows: list[Row], verdicts: Verdicts, indices: list[int]) -> str:
    refused = sum(rows[index]["right"] and verdicts[index] is False for index in indices)
    accepted = sum(not rows[index]["right"] and verdicts[index] is True for index in indices)
    return f"{refused}, {accepted}" if refused or accepted else ""


def by_rl4llm(rows: list[Row]) -> Verdicts:
    from rl4llm.core.base_reward import as_sample
    from rl4llm.core.types import ChatMessage
    from rl4llm.rewards import MathReward

    reward = MathReward(workers=1, timeout_s=PATIENCE_S)
    samples = [as_sample([ChatMessage("assistant", row["reply"])], row["ground_truth"], {}) for row in rows]
    scores = reward.score_batch(samples)
    reward.close()
    return [score == 1.0 if isinstance(score, float) else None for score in scores]


def by_math_verify(rows: list[Row]) -> Verdicts:
    from math_verify import parse, verify

    def grade(row: Row) -> bool | None:
        gold = parse(f"${row['ground_truth']}$", parsing_timeout=PATIENCE_S)
        given = parse(row["reply"], parsing_timeout=PATIENCE_S)
        return verify(gold, given, timeout_seconds=PATIENCE_S) if gold else None

    return [grade(row) for row in rows]


def by_trl(rows: list[Row]) -> Verdicts:
    from trl.rewards import accuracy_reward

    replies = [[{"role": "assistant", "content": row["reply"]}] for row in rows]
    scores = accuracy_reward(replies, [f"${row['ground_truth']}$" for row in rows])
    return [None if score is None else score == 1.0 for score in scores]


def by_inspect(rows: list[Row]) -> Verdicts:
    import asyncio

    from inspect_ai.model import ModelName, ModelOutput
    from inspect_ai.scorer import Target, math
    from inspect_ai.solver import TaskState

    async def grade_all() -> Verdicts:
        scorer = math(timeout=PATIENCE_S)

        async def grade(row: Row) -> bool | None:
            output = ModelOutput.from_content("mockllm/model", row["reply"])
            state = TaskState(ModelName("mockllm/model"), 0, 0, "", [], output=output)
            try:
                score = await scorer(state, Target(row["ground_truth"]))
            except ValueError:  # a target that it cannot parse
                return None
            return {"C": True, "I": False}.get(str(score.value)) if score else None

        return [await grade(row) for row in rows]

    return asyncio.run(grade_all())


def lm_eval_task(name: str) -> dict[str, Any]:
    """Return the functions of a task of lm-eval, without its other dependencies."""
    package = importlib.util.find_spec("lm_eval")
    assert package and package.origin
    return runpy.run_path(str(Path(package.origin).parent / "tasks" / name / "utils.py"))


def last_box(task: dict[str, Any], reply: str) -> str | None:
    box = task["last_boxed_only_string"](reply)
    return task["remove_boxed"](box) if box and box.startswith("\\boxed{") else None


def by_hendrycks(rows: list[Row]) -> Verdicts:
    task = lm_eval_task("hendrycks_math")

    def grade(row: Row) -> bool:
        boxed = last_box(task, row["reply"])
        if boxed is not None:
            return task["is_equiv"](boxed, row["ground_truth"])
        solution = {"solution": f"\\boxed{{{row['ground_truth']}}}"}
        return task["process_results"](solution, [row["reply"]])["exact_match"] == 1

    return [grade(row) for row in rows]


def by_minerva(rows: list[Row]) -> Verdicts:
    task = lm_eval_task("minerva_math")
    normal = task["normalize_final_answer"]

    def grade(row: Row) -> bool:
        boxed = last_box(task, row["reply"])
        given = task["get_unnormalized_answer"](row["reply"]) if boxed is None else boxed
        return task["is_equiv"](normal(given), normal(row["ground_truth"]))

    return [grade(row) for row in rows]


GRADERS: dict[str, tuple[str, Callable[[list[Row]], Verdicts]]] = {
    "rl4llm": ("rl4llm", by_rl4llm),
    "math-verify": ("math-verify", by_math_verify),
    "trl": ("trl", by_trl),
    "inspect-ai": ("inspect-ai", by_inspect),
    "hendrycks_math": ("lm-eval", by_hendrycks),
    "minerva_math": ("lm-eval", by_minerva),
}

if __name__ == "__main__":
    sys.exit(main())
