"""Real rows of a local model over texts: caches as `certk capture` writes them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import CertkError
from .settings import LEAST_KEYS, Settings

# Tokens of a text at which attention is looked at, unless the model has fewer positions.
LENGTHS = (128, 256, 512)
# Windows in all, spread over the texts.
WINDOWS = 4


def licence() -> str:
    """The Apache License, which comes with the package: the text if none is given."""
    places = [Path(__file__).resolve().parents[3] / "LICENSE-APACHE"]
    with contextlib.suppress(PackageNotFoundError):
        held = distribution("certk-rs").files or []
        places += [Path(str(file.locate())) for file in held if file.name == "LICENSE-APACHE"]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise CertkError("LICENSE-APACHE, the text of this experiment, was not found: install certk-rs")


def windows(texts: Sequence[str], count: int) -> list[str]:
    """At least so many windows, as many of each text: it from evenly spaced words onward."""
    each = max(1, -(-count // len(texts)))
    found = []
    for text in texts:
        for i in range(each):
            start = len(text) * i // each
            if start:
                # From the beginning of a word.
                start += len(text[start:]) - len(text[start:].partition(" ")[2])
            found.append(text[start:])
    return found


def lengths(model: Path) -> tuple[int, ...]:
    """Those of `LENGTHS` for which the model has positions."""
    try:
        most = json.loads((model / "config.json").read_text(encoding="utf-8")).get(
            "max_position_embeddings"
        )
    except (OSError, ValueError, AttributeError):
        most = None  # loading the model will say what is wrong
    able = tuple(n for n in LENGTHS if not isinstance(most, int) or n <= most)
    if not able:
        raise CertkError(
            f"{model} has {most} positions: the experiments need at least {LEAST_KEYS}"
        )
    return able


def capture(model: Path, text: str, n: int, path: Path) -> bool:
    """Write a cache of the first n tokens of a text; whether there were as many."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from ..transformers import capture_text
    except ImportError as error:
        raise CertkError(f"certk reproduce cannot run a model: {error}") from None
    if not text:
        return False
    return bool(capture_text(model, text, path, max_tokens=n)["tokens"] == n)


@contextlib.contextmanager
def settings_of_model(
    model: Path, texts: Sequence[str], brief: bool = False, seed: int = 0
) -> Iterator[Settings]:
    """Settings whose real rows are those of a model over texts, while the context lasts.

    What looks at one cache is given the beginning of the first text.

    Raises:
        CertkError: The model cannot be loaded or captured, or the first text is too short for it.
    """
    texts = tuple(texts) or (licence(),)
    n = lengths(model)[-1]
    with TemporaryDirectory(prefix="certk-reproduce-") as folder:
        path = Path(folder) / "rows.safetensors"
        while not capture(model, texts[0], n, path):
            path.unlink(missing_ok=True)
            n //= 2
            if n < LEAST_KEYS:
                raise CertkError(
                    f"the first text has less than {LEAST_KEYS} tokens: give a longer one"
                )
        source = f"the model in {model}, over the first {n} tokens of the first text"
        yield Settings(path, brief, seed, given=True, model=model, texts=texts, source=source)
