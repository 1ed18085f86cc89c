"""The experiments on small models run, and the numbers that they print and write hold."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fresh_process import run_script
from repository import ROOT

pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

EXPERIMENTS = ROOT / "experiments"


@pytest.mark.heavy  # trains a model
def test_decoder(tmp_path: Path) -> None:
    told = run_script(EXPERIMENTS / "decoder.py", "--quick", "--out", tmp_path)
    same, of = map(int, re.search(r"The first (\d+) of (\d+) bytes are the same", told).groups())
    assert of == 20
    assert 1 <= same <= of
    found = json.loads((tmp_path / "results.json").read_text())
    dense, rows = found["dense"], found["rows"]
    assert 1 < dense < 256
    assert [(row["eps"], row["keep_last"]) for row in rows] == [
        (eps, last) for last in (64, 0) for eps in (0.3, 0.1, 0.01)
    ]
    for part in (rows[:3], rows[3:]):
        kept = [row["kept"] for row in part]
        assert 0 < kept[0] < kept[1] < kept[2] < 1
        costs = [next(iter(row["costs"].values())) for row in part]
        assert costs[2]["perplexity"] == pytest.approx(dense, rel=0.01)
        assert 0 <= costs[2]["divergence"] < 0.01
        for row, own in zip(part, costs, strict=True):
            # The dense masses are sums of float64, rounded.
            assert row["excess"] <= 1e-12
            assert 0 < row["truth"] <= row["proven"] + 1e-12
            assert row["proven"] <= row["eps"]
            assert row["bytes_after"] < row["bytes_before"]
            assert all(math.isfinite(v) for each in row["costs"].values() for v in each.values())
            assert f"{own['perplexity']:.3f}" in told
    if "No baselines" not in told:
        assert {"SnapKV", "Knorm", "Random"} < rows[0]["costs"].keys()
    if (tmp_path / "decoder.svg").exists():
        assert "share of the keys" in (tmp_path / "decoder.svg").read_text()


@pytest.mark.heavy  # trains a model
def test_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    told = run_script(EXPERIMENTS / "held_out.py", "--quick", "--out", tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["passages"] == 4
    assert -1 < found["excess"] <= 1e-9
    rows = {(row["eps"], row["method"], row["kind"]): row for row in found["rows"]}
    over = 0
    for eps in (0.3, 0.05):
        for kind in ("text", "pairs", "copies", "brackets"):
            plain, guarded, recalled = (
                rows[eps, name, kind] for name in ("certified", "guard, report", "guard, recall")
            )
            # 15 bytes, 2 layers of 4 heads.
            assert plain["steps"] == guarded["steps"] == recalled["steps"] == 120
            assert plain["over"] == guarded["over"] == guarded["losses"] == guarded["noticed"]
            assert recalled["losses"] == recalled["noticed"] <= recalled["alarms"]
            assert guarded["noticed"] <= guarded["alarms"] <= 120
            assert recalled["over"] == 0
            over += plain["over"]
            # Of so short a text a guard's matrix is as large as what was dropped.
            assert 0 < plain["held"] == plain["read"] < guarded["read"] < guarded["held"]
            assert guarded["read"] < 1
            assert guarded["held"] == recalled["held"]
            assert guarded["read"] <= recalled["read"]
            assert guarded["perplexity"] == plain["perplexity"]
        assert f"{rows[eps, 'guard, recall', 'text']['perplexity']:.3f}" in told
    # Large random weights miss what was dropped, or this test would show nothing.
    assert over > 50
    if "No baselines" not in told:
        assert (0.3, "SnapKV", "text") in rows
    if (tmp_path / "held_out.svg").exists():
        assert "guard, recall" in (tmp_path / "held_out.svg").read_text()
    # A second run takes the model from its file.
    import far_decoder

    file = tmp_path / "model.safetensors"
    before = file.stat().st_mtime_ns
    far_decoder.trained(file, far_decoder.QUICK, Console())
    assert file.stat().st_mtime_ns == before
    far_decoder.trained(file, replace(far_decoder.QUICK, seed=1), Console())
    assert file.stat().st_mtime_ns > before


def test_true_losses_are_those_of_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    import far_decoder
    import torch
    import true_losses

    torch.manual_seed(0)
    model = far_decoder.untrained(far_decoder.QUICK).eval()
    ids = torch.arange(40)[None]
    cache = hf.DynamicCache()
    with torch.inference_mode():
        model(ids[:, :30], past_key_values=cache)
        keys = [layer.keys[0] for layer in cache.layers]
        with true_losses.Watch(model) as watch:
            for at in (slice(30, 33), slice(33, 40)):
                model(ids[:, at], past_key_values=cache)
        model.set_attn_implementation("eager")
        weights = model(ids, output_attentions=True).attentions
    dropped = torch.zeros(2, 30, dtype=torch.bool)
    dropped[0, :7] = dropped[1, 20:] = True
    for layer, each in enumerate(weights):
        masses = watch.masses(layer, keys[layer])
        torch.testing.assert_close(masses.float(), each[0, :, 30:, :30], atol=2e-5, rtol=0)
        expected = torch.cat([each[0, :2, 30:, :7].sum(-1), each[0, 2:, 30:, 20:30].sum(-1)])
        lost = true_losses.lost(masses, dropped).float()
        torch.testing.assert_close(lost, expected, atol=1e-4, rtol=0)


def test_a_loss_that_no_guard_has_noticed_ends_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    import far_decoder
    import held_out

    model = far_decoder.untrained(far_decoder.QUICK).eval()
    [passage, *_] = held_out.passages(1, 256, 16)
    true = held_out.lost
    monkeypatch.setattr(held_out, "lost", lambda *of: 0.5 * true(*of) + 0.5)
    with pytest.raises(SystemExit, match="were not noticed"):
        held_out.measure(model, [passage], [0.3], lambda _: None)
    monkeypatch.setattr(held_out, "lost", lambda *of: true(*of) + 1e-6)
    with pytest.raises(SystemExit, match="more than its guard has proven"):
        held_out.measure(model, [passage], [0.3], lambda _: None)
