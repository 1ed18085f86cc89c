"""Presses in the experiments: needles and held-out passages, beside certified pruning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repository import ROOT

pytestmark = pytest.mark.older


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")


def untrained() -> Any:
    import far_decoder

    torch.manual_seed(0)
    return far_decoder.untrained(far_decoder.QUICK).eval()


def test_the_answer_stands_behind_the_question() -> None:
    import needles

    for needle in needles.needles(3, 512):
        text, asked = bytes(needle.context[0].tolist()), bytes(needle.question[0].tolist())
        answer = bytes(needle.answer[0].tolist())
        assert len(text) == 512
        if needle.task == "chain":
            links = asked + answer
            assert all(text.count(links[i : i + 2]) == 1 for i in range(len(answer)))
            continue
        assert text.count(asked + answer) == 1
        symbols = [byte for byte in text if byte > 127]
        assert len(symbols) == len(set(symbols)) == 8 * (1 if needle.task == "single" else 16)


def test_scores_count_bytes() -> None:
    """A model that repeats the next byte number, whatever it reads."""
    import needles

    def following(ids: Any, **_: Any) -> Any:
        logits = torch.nn.functional.one_hot((ids + 1) % 256, 256).float()
        return type("Output", (), {"logits": logits})

    for answer, score in (([8, 9, 10], 1), ([8, 3, 10, 1], 0.5)):
        asked = needles.Needle(
            "single", *(torch.tensor([each]) for each in ([0] * 9, [4, 7], answer))
        )
        assert needles.score(following, None, asked) == score


def test_a_guard_answers_as_the_whole_cache_does() -> None:
    import needles

    model = untrained()
    rows = needles.measure(model, list(needles.needles(1, 256)), (0.5,), lambda _: None)
    by_name = {row["press"]: row for row in rows}
    assert set(by_name) == {needles.WHOLE, *needles.ours(), *needles.presses()}
    assert model.config._attn_implementation == "sdpa"
    for row in rows:
        assert 0 <= row["median_lost"] <= row["lost"] <= 1
    # Of as many keys ours lose least in the worst query.
    least = by_name["Certk, compact"]["lost"]
    assert by_name["Certk"]["lost"] < 1
    assert all(least <= by_name[name]["lost"] for name in needles.presses())


def test_held_out_presses_hold_as_many_bytes_and_drop_what_they_say() -> None:
    import held_out

    model = untrained()
    [passage, *_] = held_out.passages(1, 256, 16)
    whole, names = held_out.prefill(model, passage), list(held_out.presses())
    assert {"SnapKV", "ExpectedAttention", "Knorm", "StreamingLLM", "Random"} == set(names)
    cache = held_out.pressed(model, held_out.presses()["StreamingLLM"], passage, 0.5)
    expected = torch.ones(256, dtype=torch.bool)
    # StreamingLLM keeps the first 4 and the last.
    expected[:4] = expected[-124:] = False
    for dropped in held_out.dropped_of(cache, whole):
        assert torch.equal(dropped, expected.expand(2, 256))
    for share, over in ((0.3, 0.1), (0.8, 0.1), (1.0, 0.0)):
        sums = {name: held_out.Sums() for name in names}
        held_out.baselines(model, passage, whole, share, over, sums)
        for each in sums.values():
            row = each.row()
            assert row["held"] == row["read"] == pytest.approx(share, abs=1 / 256)
            # Nobody tells of it.
            assert row["noticed"] == row["alarms"] == 0
            if share == 1.0:
                assert row["over"] == 0
                assert row["divergence"] == pytest.approx(0, abs=1e-6)
            else:
                assert 0 < row["over"] <= row["steps"] == 120
                assert row["divergence"] > 0
