"""Notebooks of `examples`: checked in without outputs, and executed from the first cell to the last."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
assert NOTEBOOKS

# Displays the value of the last expression of a cell as a notebook does.
DISPLAY = """
def _display(value):
    if value is not None:
        print("shown:", value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
"""


def cells_of(notebook: Path) -> list[str]:
    """The code of the cells of a notebook."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def as_script(notebook: Path) -> str:
    """A program that does what the cells of a notebook do, one after another, in one process."""
    parts = [DISPLAY]
    for cell in cells_of(notebook):
        tree = ast.parse(cell)
        if isinstance(tree.body[-1], ast.Expr):
            shown = ast.Call(ast.Name("_display", ast.Load()), [tree.body[-1].value], [])
            tree.body[-1] = ast.Expr(shown)
        parts.append(ast.unparse(ast.fix_missing_locations(tree)))
    return "\n".join(parts)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(notebook):
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    assert notebook.stat().st_size < 20_000
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Without a kernel, which would take longer to install than the notebook to run."""
    monkeypatch.chdir(tmp_path)
    exec(compile(as_script(ROOT / "examples/your_data.ipynb"), "your_data.ipynb", "exec"), {"__name__": "notebook"})
    sizes, table, page = capsys.readouterr().out.split("shown: ")[1:]
    assert len(ast.literal_eval(sizes)) == 8
    assert all(f"<td>{name}<td>0." in table for name in ("fedavg", "topk+int8", "mapo"))
    assert "&lt;svg" in page
    assert page.rstrip().endswith("of 114 correct")
    assert {run.name for run in (tmp_path / "notebook-runs").iterdir()} == {"fedavg", "topk+int8", "mapo"}
