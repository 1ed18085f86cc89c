"""Capturing the queries, keys and values of a forward pass in a cache file."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from ..errors import CertkError
from .capture_file import WRITING, Attended, CacheWriter, Observation
from .presses import NAME
from .switch import switch


def capture(
    model: Any,
    inputs: Mapping[str, Any] | torch.Tensor,
    path: str | os.PathLike[str],
    *,
    queries: int | None = None,
) -> list[int]:
    """Run a model densely, and write what its attention layers see to a cache file (docs/files.md).

    Keys and queries are as attention gets them, after rotary positions. Layers are written as they
    run, so that memory holds one. The model's attention implementation is as before afterwards.

    Args:
        model: A `transformers.PreTrainedModel` on the CPU. What lies above its base model (a
            language model's head) does not run.
        inputs: What the model is called with, as from a tokenizer, or the input ids: one sequence,
            without padding.
        path: The file to write; it must not exist.
        queries: Write only the last so many queries of each layer, at least 1; None for all.
            Pruning certifies what is written.

    Returns:
        The numbers of the layers written.

    Raises:
        CertkError: A model that cannot be switched over, more than one sequence, padding, sliding
            windows shorter than the text, layers of different scales.
    """
    if queries is not None and (isinstance(queries, bool) or queries < 1):
        raise CertkError(f"queries is {queries!r}; pass a whole number >= 1, or None for all")
    _need_model(model)
    most = max(sum(1 for _ in model.modules()), getattr(model.config, "num_hidden_layers", 0))
    with CacheWriter(path, most, queries) as writer:

        def write(seen: Attended) -> None:
            writer.write(seen.layer, seen.query, seen.key, seen.value, seen.scale, seen.offset)

        layers = observe(model, inputs, write)
        writer.commit()
        return layers


def observe(
    model: Any, inputs: Mapping[str, Any] | torch.Tensor, hear: Callable[[Attended], None]
) -> list[int]:
    """Run a model densely, hand each attention call to `hear`, and return the layers' numbers.

    Arguments and errors are those of `capture`.
    """
    _need_model(model)
    given: dict[str, Any] = (
        {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    )
    base = model.base_model
    if "use_cache" in inspect.signature(base.forward).parameters:
        given.setdefault("use_cache", False)
    observation = Observation(hear)
    token = WRITING.set(observation)
    try:
        with _switched(model), torch.inference_mode():
            base(**given)
    finally:
        WRITING.reset(token)
    if not observation.layers:
        raise CertkError(
            "no attention call was seen: the model does not take its attention from transformers' "
            "AttentionInterface"
        )
    return sorted(observation.layers)


def _need_model(model: Any) -> None:
    if not isinstance(model, transformers.PreTrainedModel):
        raise CertkError(f"model is a {type(model).__name__}; pass a transformers.PreTrainedModel")


def capture_text(
    model: str | os.PathLike[str],
    text: str,
    path: str | os.PathLike[str],
    *,
    max_tokens: int | None = None,
    queries: int | None = None,
) -> dict[str, Any]:
    """Load a model and its tokenizer from a directory, and capture a text; nothing is downloaded.

    Args:
        model: Directory of a saved model with its tokenizer. It runs in the dtype it is stored in.
        text: The text.
        path: As in `capture`.
        max_tokens: Cut the text after so many tokens.
        queries: As in `capture`.

    Returns:
        "tokens": how many there were; "layers": the numbers of the layers written; "dtype".

    Raises:
        CertkError: No model there, a text without tokens, or longer than the model's positions.
    """
    loaded, given, tokens = load_with_text(model, text, max_tokens)
    layers = capture(loaded, given, path, queries=queries)
    return {"tokens": tokens, "layers": layers, "dtype": str(loaded.dtype).removeprefix("torch.")}


def load_with_text(
    model: str | os.PathLike[str], text: str, max_tokens: int | None, *, cut: bool = False
) -> tuple[Any, dict[str, Any], int]:
    """Load the model of a directory, and return it, its inputs for a text, and their length.

    Arguments and errors as in `capture_text`; `cut` has a text cut that is longer than the model's
    positions, which is an error otherwise.
    """
    folder = Path(model)
    if not folder.is_dir():
        raise CertkError(f"{folder} is no directory: give that of a saved model with its tokenizer")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with _quiet():
            loaded, told = transformers.AutoModel.from_pretrained(
                folder, local_files_only=True, dtype="auto", output_loading_info=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise CertkError(f"{folder} cannot be loaded: {error}") from error
    # What lies above the layers may be missing; attention does not depend on it.
    if missing := sorted(name for name in told["missing_keys"] if "pooler" not in name):
        raise CertkError(
            f"{folder} lacks {len(missing)} weights (first: {missing[0]}), which would be random: "
            "give the directory of a whole model"
        )
    most = getattr(loaded.config, "max_position_embeddings", None)
    if cut and isinstance(most, int) and most > 0:
        max_tokens = most if max_tokens is None else min(most, max_tokens)
    encoded = tokenizer(
        text, return_tensors="pt", verbose=False,
        truncation=max_tokens is not None, max_length=max_tokens,
    )  # fmt: skip
    tokens = int(encoded["input_ids"].shape[-1])
    if tokens == 0:
        raise CertkError("the text has no tokens: give one that has")
    if isinstance(most, int) and 0 < most < tokens:
        raise CertkError(
            f"the text has {tokens} tokens, the model {most} positions: give --max-tokens {most}"
        )
    accepted = inspect.signature(loaded.forward).parameters
    return loaded, {name: each for name, each in encoded.items() if name in accepted}, tokens


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bar and the loading report of transformers, which say nothing new."""
    logging = transformers.utils.logging
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def _switched(model: Any) -> Iterator[None]:
    """Switch a model to certified attention's name and evaluation mode, and back on leaving."""
    before = {"": model.config._attn_implementation}
    for name in getattr(model.config, "sub_configs", {}):
        if (part := getattr(model.config, name, None)) is not None:
            before[name] = part._attn_implementation
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        switch(model)
        yield
    finally:
        if before != dict.fromkeys(before, NAME):
            model.set_attn_implementation(before if len(before) > 1 else before[""])
        # Not by train(), which would reach into parts that somebody has frozen.
        for module in training:
            module.training = True
