"""What the documents of other projects say works, or ends in one line that names the counterpart."""

import subprocess
import sys
from pathlib import Path

import migration_tables
import pytest
import run_train
import yaml

from rl4llm.core.errors import RL4LLMError
from rl4llm.extensions.migration.convert import convert
from rl4llm.extensions.migration.read import read
from rl4llm.extensions.migration.row import DataFacts
from rl4llm.rewards.registry import REWARDS

FOLDER = Path(__file__).parent
SNIPPETS = yaml.safe_load((FOLDER / "snippets.yaml").read_text())
ROWS = [(project, row) for project, rows in SNIPPETS.items() for row in rows]
FILES = {path.stem: path for path in (FOLDER / "sources").glob("*.yaml")}


def use(row):
    """Do what a row says; return its message, "" if it works."""
    try:
        if "python" in row:
            exec(row["python"], {})
        elif "convert" in row:
            source = read(
                str(FOLDER / "sources" / row["file"]) if "file" in row else row["convert"].format(**FILES)
            )
            found = convert(source.project, source.values, DataFacts(1000))
            assert len(found.keys) > 5
        elif "script" in row:
            run_train._parser("grpo").parse_args(row["script"].format(**FILES).split())
    except (ImportError, RL4LLMError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("project", "row"), ROWS, ids=[f"{p}-{r.get('shown', next(iter(r.values())))[:60]}" for p, r in ROWS]
)
def test_snippet_works_or_names_its_counterpart(project, row, monkeypatch):
    monkeypatch.setattr(REWARDS, "_items", dict(REWARDS._items))
    said = " ".join(use(row).split())
    assert (row["error"] in said) if "error" in row else said == ""


def test_tables_of_all_projects_are_printed():
    command = [sys.executable, migration_tables.__file__]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "### All configs" in shown
    assert all(text in shown for text in migration_tables.of_projects().values())


def test_page_has_the_tables_of_each_project():
    page = migration_tables.PAGE.read_text()
    for mark, text in migration_tables.of_projects().items():
        assert f"<!-- {mark} -->\n\n{text}\n\n<!-- end of {mark} -->" in page, (
            f"scripts/migration_tables.py --write: {mark}"
        )
