"""Needles under kvpress's protocol: tasks are what they say, and a guard loses none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repository import ROOT

pytestmark = pytest.mark.older


@pytest.fixture
def needles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import needles as found

    return found


def test_the_answer_stands_behind_the_question(needles: Any) -> None:
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


def test_scores_count_bytes(needles: Any) -> None:
    """A model that repeats the next byte number, whatever it reads."""

    class Next:
        def __call__(self, ids: Any, **_: Any) -> Any:
            logits = torch.nn.functional.one_hot((ids + 1) % 256, 256).float()
            return type("Output", (), {"logits": logits})

    def asked(answer: list[int]) -> Any:
        tensors = (torch.tensor([each]) for each in ([0] * 9, [4, 7], answer))
        return needles.Needle("single", *tensors)

    assert needles.score(Next(), None, asked([8, 9, 10])) == 1
    assert needles.score(Next(), None, asked([8, 3, 10, 1])) == 0.5


def test_a_guard_answers_as_the_whole_cache_does(needles: Any) -> None:
    import far_decoder

    torch.manual_seed(0)
    model = far_decoder.untrained(far_decoder.QUICK).eval()
    chosen = list(needles.needles(1, 256))
    rows = needles.measure(model, chosen, (0.5,), lambda _: None)
    by_name = {row["press"]: row for row in rows}
    assert set(by_name) == {needles.WHOLE, *needles.ours(), *needles.presses()}
    assert model.config._attn_implementation == "sdpa"
    for row in rows:
        assert 0 <= row["median_lost"] <= row["lost"] <= 1
    # Of as many keys ours lose least in the worst query.
    least = by_name["Certk, compact"]["lost"]
    assert by_name["Certk"]["lost"] < 1
    assert all(least <= by_name[name]["lost"] for name in needles.presses())
