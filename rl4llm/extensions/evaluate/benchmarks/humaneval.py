"""HumanEval: 164 functions to complete; the program in the answer runs against the problem's tests in the sandbox.

Chen et al. 2021, "Evaluating Large Language Models Trained on Code".
"""

from __future__ import annotations

from rl4llm.extensions.evaluate.benchmarks import Benchmark, Reader, Row

PROMPT = "Complete this function. Answer with the whole of it in one ```python block.\n\n```python\n{}\n```"


def rows(read: Reader) -> list[Row]:
    """Return the prompts of the test split, with the columns that the reward `code` reads."""
    return [
        {
            "prompt_id": row["task_id"],
            "messages": [{"role": "user", "content": PROMPT.format(row["prompt"])}],
            "ground_truth": row["test"],
            "prompt": row["prompt"],
            "entry_point": row["entry_point"],
        }
        for row in read("test")
    ]


HUMANEVAL = Benchmark(
    version=1, source="openai/openai_humaneval", rows=rows, rewards=[{"name": "code"}], max_tokens=1024
)
