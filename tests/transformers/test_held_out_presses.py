"""The presses that experiments/held_out.py measures beside certified pruning, where kvpress is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repository import ROOT

pytestmark = pytest.mark.older


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, Any]:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import far_decoder
    import held_out

    torch.manual_seed(0)
    model = far_decoder.untrained(far_decoder.QUICK).eval()
    [passage, *_] = held_out.passages(1, 256, 16)
    return held_out, model, passage, held_out.prefill(model, passage)


def test_dropped_keys_are_found_by_their_bits(made: tuple[Any, Any, Any, Any]) -> None:
    held_out, model, passage, whole = made
    press = held_out.presses()["StreamingLLM"]
    cache = held_out.pressed(model, press, passage, 0.5)
    expected = torch.ones(256, dtype=torch.bool)
    # StreamingLLM keeps the first 4 and the last.
    expected[:4] = expected[-124:] = False
    for dropped in held_out.dropped_of(cache, whole):
        assert torch.equal(dropped, expected.expand(2, 256))


def test_presses_hold_as_many_bytes(made: tuple[Any, Any, Any, Any]) -> None:
    held_out, model, passage, whole = made
    names = list(held_out.presses())
    assert {"SnapKV", "ExpectedAttention", "Knorm", "StreamingLLM", "Random"} == set(names)
    for share in (0.3, 0.8):
        sums = {name: held_out.Sums() for name in names}
        held_out.baselines(model, passage, whole, share, 0.1, sums)
        for each in sums.values():
            row = each.row()
            assert row["held"] == row["read"] == pytest.approx(share, abs=1 / 256)
            assert 0 < row["over"] <= row["steps"] == 120
            assert row["divergence"] > 0
            # Nobody tells of it.
            assert row["noticed"] == row["alarms"] == 0


def test_a_press_that_drops_nothing_loses_nothing(made: tuple[Any, Any, Any, Any]) -> None:
    held_out, model, passage, whole = made
    sums = {name: held_out.Sums() for name in held_out.presses()}
    held_out.baselines(model, passage, whole, 1.0, 0.0, sums)
    for each in sums.values():
        assert each.over == 0
        assert each.row()["divergence"] == pytest.approx(0, abs=1e-6)
