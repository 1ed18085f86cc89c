"""Tests of models: what they need, and how they run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

MODELS = all(find_spec(name) for name in ("torch", "transformers"))
collect_ignore_glob = [] if MODELS else ["test_*.py"]
# These run in the older environment alone.
if find_spec("kvpress") is None:
    collect_ignore_glob += ["test_kvpress*.py"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small take longer with several threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
