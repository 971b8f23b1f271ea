"""MATH-500: 500 competition problems without examples; the boxed answer counts.

Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH Dataset"; the 500 problems are those that
Lightman et al. 2023, "Let's Verify Step by Step", held out.
"""

from __future__ import annotations

from rl4llm.extensions.evaluate.benchmarks import Benchmark, Reader, Row

PROMPT = "{}\n\nReason step by step, then give the final answer as \\boxed{{answer}}."


def rows(read: Reader) -> list[Row]:
    """Return the prompts of the test split."""
    return [
        {
            "messages": [{"role": "user", "content": PROMPT.format(row["problem"])}],
            "ground_truth": row["answer"],
            **({"prompt_id": row["unique_id"]} if "unique_id" in row else {}),
        }
        for row in read("test")
    ]


MATH500 = Benchmark(
    version=1, source="HuggingFaceH4/MATH-500", rows=rows, rewards=[{"name": "math"}], max_tokens=2048
)
