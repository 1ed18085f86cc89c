"""Notebooks run without Jupyter: cells in their order, in one namespace, and what they show.

    python tests/support/notebooks.py examples/quickstart.ipynb

runs a notebook and stores its outputs in it: what is printed, the value of a last expression as
text, and pictures of the figures that a cell draws. `nbclient` would do the same by a server and
twenty packages more.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

# Of pictures, so that the file stays small.
_DOTS_PER_INCH = 80


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, run in the current folder."""
    module = types.ModuleType("__main__")
    outputs = []
    for number, cell in enumerate(code_cells(notebook), 1):
        outputs.append(_run("".join(cell["source"]), f"{name}, code cell {number}", module, number))
    return outputs


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the texts of a cell's outputs, pictures aside."""
    return [
        "".join(each["text"] if each["output_type"] == "stream" else each["data"]["text/plain"])
        for each in outputs
        if not pictures([each])
    ]


def pictures(outputs: list[dict[str, Any]]) -> int:
    """Count the pictures among the outputs of a cell."""
    return sum("image/png" in each.get("data", {}) for each in outputs)


def _run(source: str, where: str, module: types.ModuleType, number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source, where)
    # A semicolon at the end says that the value is not to be shown.
    shown = isinstance(tree.body[-1], ast.Expr) and not source.endswith(";")
    last = tree.body.pop() if shown else None
    value = None
    before = _figures()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, where, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), module.__dict__)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return [*outputs, *(_picture(each) for each in sorted(_figures() - before))]


def _figures() -> set[int]:
    """The figures that are open; importing matplotlib is for the notebook."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    return set(pyplot.get_fignums()) if pyplot else set()


def _picture(number: int) -> dict[str, Any]:
    """A figure as an output, which closes it."""
    pyplot, into = sys.modules["matplotlib.pyplot"], io.BytesIO()
    figure = pyplot.figure(number)
    figure.savefig(into, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    pyplot.close(figure)
    data = {"image/png": base64.b64encode(into.getvalue()).decode()}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main(path: Path) -> None:
    """Run a notebook in a folder that is thrown away, and store what it shows."""
    import tempfile

    os.environ["MPLBACKEND"] = "agg"
    notebook = json.loads(path.read_text())
    file = path.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = run(notebook, path.name)
        os.chdir(file.parent)
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), found, strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, outputs
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
