"""A notebook as a page: its text, its code, and the outputs that are stored in it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the text of the page, and the pictures beside it by their names."""
    notebook = json.loads(path.read_text())
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                # Beside the page, and nowhere in the repository: not a link between files.
                parts.append(f'<img alt="What the cell above draws" src="{name}">')
            else:
                parts.append(f"```text\n{_text(output)}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _text(output: dict[str, Any]) -> str:
    told = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    return "".join(told).rstrip("\n")
