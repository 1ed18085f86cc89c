"""Caches without queries: codes and rows of forced positions, of which nothing is promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from certk_rs import CertkError, gate, prune, verify
from certk_rs.cli import main
from cli_fixtures import Arrays, forge, opened
from second_verifier import second_verdict

HEADS, N, D, LAYERS = 2, 37, 16, 2
CODES: dict[str, Any] = {"queries": "none", "rest": "codes"}


def made(folder: Path, dtype: Any = np.float32, layout: str = "hnd", **metadata: str) -> Path:
    """Write a cache without queries; a key of each layer is too long for a code."""
    rng, arrays = np.random.default_rng(3), {}
    for i in range(LAYERS):
        for role in ("key", "value"):
            rows = rng.standard_normal((HEADS, N, D))
            if role == "key":
                rows[1, 20] *= 1000
            rows = rows if layout == "hnd" else rows.swapaxes(0, 1)
            arrays[f"layers.{i}.{role}"] = np.ascontiguousarray(rows, dtype)
    path = folder / "c.safetensors"
    save_file(arrays, path, metadata or None)
    return path


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 5), (30, 30)])
def test_outputs(tmp_path: Path, granularity: str, first: int, last: int, layout: str) -> None:
    source = made(tmp_path, layout=layout)
    options = {**CODES, "layout": layout, "granularity": granularity}
    found = prune(source, tmp_path / "out", keep_first=first, keep_last=last, **options)
    [report] = found.outputs
    assert any("nothing is promised" in warning for warning in report.warnings)
    assert "of no query" in found.summary()
    sets = [one for layer in report.layers for one in layer.sets]
    assert all((one.rows, one.worst_tail_mass, one.lower_bound) == (0, None, None) for one in sets)
    output = Path(report.target)
    _, held = opened(output)
    forced = [i for i in range(N) if i < first or i >= N - last]
    groups = HEADS if granularity == "head" else 1
    given = load_file(source)
    for i in range(LAYERS):
        np.testing.assert_array_equal(held[f"layers.{i}.indices"], forced * groups)
        for role in ("key", "value"):
            rows = given[f"layers.{i}.{role}"]
            rows = rows if layout == "hnd" else rows.swapaxes(0, 1)
            kept = held[f"layers.{i}.{role}"].reshape(HEADS, -1, D)
            np.testing.assert_array_equal(kept, rows[:, forced])
            # The key without a code has its row beside the codes.
            np.testing.assert_array_equal(held[f"layers.{i}.{role}_bare"], rows[1:, 20])
    assert not [name for name in held if "mass" in name or "lower_bound" in name]
    for against in (None, source):
        [judged] = verify(output, against, layout=layout).outputs
        assert judged.holds, judged.findings
        assert (judged.rows, judged.confirmed_rows, judged.worst_tail_mass) == (0, 0, None)
        assert any("no row was judged" in warning for warning in judged.warnings)
    assert second_verdict(output, source, layout)[0] == 0
    [gated] = gate(output, tv=1.0, unproven=1.0).files
    assert not gated.passes
    # Shapes do not tell nhd, and gate cannot be told.
    assert ("the input has none" if layout == "hnd" else "--layout nhd") in gated.reason


def test_false_outputs_are_found(tmp_path: Path) -> None:
    source = made(tmp_path)
    [report] = prune(source, tmp_path / "out", keep_last=4, **CODES).outputs
    output = Path(report.target)
    whole = output.read_bytes()

    def codes(arrays: Arrays) -> None:
        arrays["layers.1.key_codes"] = arrays["layers.1.key_codes"].copy()
        arrays["layers.1.key_codes"][0, 0, 0] ^= 0x40

    def rows(arrays: Arrays) -> None:
        arrays["layers.0.value"] = arrays["layers.0.value"] + np.float32(1)

    def bare(arrays: Arrays) -> None:
        arrays["layers.0.key_bare"] = arrays["layers.0.key_bare"] * np.float32(2)

    for edit in (codes, rows, bare):
        output.write_bytes(whole)
        forge(output, edit)
        assert not verify(output, source).holds
        assert second_verdict(output, source)[0] == 1
    for name, value in (("keep_last", 5), ("keep_first", 1)):
        output.write_bytes(whole)
        forge(
            output, say=lambda body, name=name, value=value: body["options"].update({name: value})
        )
        assert not verify(output).holds
        assert second_verdict(output, source)[0] == 1
    # Of format 2 such an input is none.
    output.write_bytes(whole)
    forge(output, say=lambda body: body.update(format=2))
    assert not verify(output).holds


def test_later_queries_have_a_proof(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from certk_rs import transformers as ct

    source = made(tmp_path)
    [report] = prune(source, tmp_path / "out", keep_first=1, keep_last=4, **CODES).outputs
    cache = ct.from_cache(report.target)
    assert isinstance(cache, ct.CodedCache)
    given, rng = load_file(source), np.random.default_rng(8)
    for i, layer in enumerate(cache.layers):
        key, value = (given[f"layers.{i}.{role}"].astype(np.float64) for role in ("key", "value"))
        q = rng.standard_normal((2 * HEADS, 3, D)).astype(np.float32)
        found = layer.index.attention(q[None], 0.02, kept=layer._kept)
        scores = np.einsum("hmd,hnd->hmn", q, np.repeat(key, 2, 0)) / np.sqrt(D)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        truth = weights @ np.repeat(value, 2, 0)
        off = np.linalg.norm(found.out[0] - truth, axis=-1)
        assert (off <= found.error_bound[0] + 1e-5).all()
        assert found.tail_mass_upper.max() <= 0.02


def refused(source: Path, words: str, **options: Any) -> None:
    with pytest.raises(CertkError, match=words):
        prune(source, source.parent / "bad", **options)
    assert not (source.parent / "bad").exists()


def test_refusals(tmp_path: Path) -> None:
    source = made(tmp_path)
    refused(source, "no queries to certify for.*--queries none", eps=0.1)
    refused(source, "goes with rest codes", queries="none", keep_last=4)
    refused(source, "goes with rest codes", queries="none", rest="file")
    refused(source, "queries is 'some'", queries="some", rest="codes")
    for name, value in (
        *(("eps", 0.1), ("size", 5), ("size_bytes", 10**6), ("out_tol", 0.1), ("hot", 3)),
        *(("max_keep", 3), ("block_size", 4), ("coverage", 0.5), ("holdout", 0.2)),
        *(("proof", "full"), ("proof", "compact")),
    ):
        refused(source, f"queries none and {name} exclude each other", **CODES, **{name: value})
    held = load_file(source)
    held["layers.1.query"] = held["layers.1.key"]
    save_file(held, source)
    refused(source, "layers.1.query.* has queries: leave --queries none out", **CODES)
    refused(source, "layer 0 has no query tensor", eps=0.1)
    refused(made(tmp_path, causal_offset="3"), "causal_offset is of queries.*remove it", **CODES)
    held["layers.0.key"][0, 3, 1] = np.nan
    save_file({k: v for k, v in held.items() if "query" not in k}, source)
    [failure] = prune([source, source.parent / "c.safetensors"], tmp_path / "o", **CODES).failures
    assert "nan at [0, 3, 1]" in failure.message


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = made(tmp_path, np.float16), tmp_path / "out"
    said = ["--queries", "none", "--rest", "codes", "--keep-last", "4"]
    assert main(["inspect", str(source)]) == 1
    told = capsys.readouterr()
    assert "prune needs --queries none --rest codes" in told.err
    assert "it has no queries" in told.out
    assert main(["prune", str(source), "-o", str(out), *said, "--dry-run"]) == 0
    assert "0 scores" in capsys.readouterr().out
    assert not out.exists()
    assert main(["prune", str(source), "-o", str(out), *said]) == 0
    assert "no query was judged" in capsys.readouterr().out
    assert main(["prune", str(source), "-o", str(out), *said, "--resume"]) == 0
    capsys.readouterr()
    assert main(["verify", str(out), "--against", str(source)]) == 0
    assert "no row was judged" in capsys.readouterr().out
    assert main(["report", str(out), "--csv", str(tmp_path / "t.csv")]) == 0
    assert "no query was judged" in capsys.readouterr().out
    assert main(["report", str(out), "--html", str(tmp_path / "t.html")]) == 0
    capsys.readouterr()
    assert main(["report", str(out), "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)["totals"]
    assert (totals["rows"], totals["worst_tail_mass"], totals["lower_bound"]) == (0, None, None)
    assert main(["gate", str(out), "--keys", "1.0"]) == 1
    assert "is not proven of any query" in capsys.readouterr().out
    assert main(["inspect", str(out / "c.safetensors")]) == 0
    assert main(["analyze", str(source)]) == 2
