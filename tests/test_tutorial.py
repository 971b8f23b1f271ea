"""The chapters of the tutorial run in a kernel, keep what they promise, and are stored small."""

import json
import shutil
from pathlib import Path

import pytest
from test_notebook import started

TUTORIAL = Path(__file__).parent.parent / "examples" / "tutorial"
PROMISES = {  # of each chapter, in names of its cells
    "1_loop": "before < 0.3 and after > 0.6",
    "2_reward": "hacked_paid > 0.75 and hacked_right < 0.35 and mended_right > hacked_right + 0.15",
    "3_tool": "calls > 0.42 and last > first + 0.08",
    "4_failing": "after > before + 0.05 and all(step['truncated'] == 1 for step in runs['answers cut off'])",
    "5_ppo_or_grpo": "min(ends.values()) > sum(starts) / len(starts) + 0.05 and gap < 0.15",
    "6_sft_then_rl": "alone[5] < 0.05 and greedy > sampled + 0.1 and after_rl[15] > sampled + 0.08",
    "7_server": "oldest == 1 and abs(rewards['alone'] - rewards['served']) < 0.2 and mismatch < 0.2",
    "8_ship": "after > before + 0.08 and ask('1234') == '0' and ask('5677') == '1'",
}
LARGEST_BYTES = 60_000
SHORTER = {  # lines after the cell that defines `run`: three failures less, whose numbers nothing promises; one seed of two
    "4_failing": "\nfirst, told = run, ('healthy', 'short', 'template')\nrun = lambda name, **keys: "
    "first(name, **keys) if name in told else history(folder / 'healthy')",
    "5_ppo_or_grpo": "\nfirst, played = run, {}\nrun = lambda name, *rest, **keys: "
    "played.get(name) or played.setdefault(name, first(name, *rest, **keys))",
}
ONCE = """
import shutil
import zlib

def imitate(answers, directory, steps, seed=0, train=imitate):
    made = Path(__file__).with_name(str(zlib.crc32(json.dumps([answers, steps, seed]).encode())))
    if not made.exists():
        shutil.move(train(answers, directory, steps, seed), made)
    return made
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Return a copy of the directory, in which the chapters run; those that imitate the same answers share the model."""
    chapters = shutil.copytree(TUTORIAL, tmp_path_factory.mktemp("tutorial") / "chapters")
    with (chapters / "task.py").open("a") as task:
        task.write(ONCE)
    return chapters


def cells(name, kind):
    """Return the sources of the cells of a chapter."""
    book = json.loads((TUTORIAL / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("name", PROMISES)
def test_chapter_keeps_its_promise(desk, warm_python, name):
    with started(warm_python, desk) as kernel:
        kernel.run("%matplotlib inline")  # it is imported already
        for code in cells(name, "code"):
            said = kernel.run(code + (SHORTER.get(name, "") if "\ndef run(" in code else ""))
            assert "Traceback" not in said, said
        assert "kept: True" in kernel.run(f"print('kept:', bool({PROMISES[name]}))")


@pytest.mark.parametrize("name", PROMISES)
def test_chapter_is_small_and_has_its_parts(name):
    file = TUTORIAL / f"{name}.ipynb"
    book, text = json.loads(file.read_text()), cells(name, "markdown")
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert file.stat().st_size < LARGEST_BYTES and len(pictures) == 1
    assert not [output for output in outputs if output["output_type"] == "error"]
    words = len(" ".join(text).split())
    assert 400 < words < 1000 and "**Promise:**" in text[0] and "**Next:**" in text[-1]
    assert any(part.lstrip().startswith("## Exercise") or "\n## Exercise" in part for part in text)


def test_every_chapter_is_tested_and_linked():
    page = (TUTORIAL.parents[1] / "docs" / "tutorial.md").read_text()
    names = {file.stem for file in TUTORIAL.glob("*.ipynb")}
    assert names == set(PROMISES) and all(f"{name}.ipynb" in page for name in names)
