"""Forged outputs: rewritten as a whole, hashes and all, by somebody who knows the format.

The output's own numbers or the input must refute them. Whatever an output states, the audit ends
with a verdict: no exception, and no memory in proportion to claimed sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import CertkError
from certk_rs.audit import MOST_FINDINGS, OutputAudit, audit
from cli_fixtures import (
    Arrays,
    Body,
    Job,
    answered,
    cache_tensors,
    certk,
    forge,
    forge_input,
    opened,
    raw_file,
    safetensors_bytes,
    said,
    tensor,
    write_cache,
)
from forgeries import (
    EDGE,
    FORGERIES,
    MANY_KEYS,
    Say,
    claim_keys,
    eps,
    field,
    keep_only,
    new,
    no_proof,
    option,
    put,
    scale_masses,
    widened,
)
from made_outputs import Honest


@pytest.fixture
def job(honest: Honest, tmp_path: Path) -> Job:
    """Two layers of three kv heads, causal, no max_keep."""
    return honest.copy("threes", tmp_path)


@pytest.fixture
def small(honest: Honest, tmp_path: Path) -> Job:
    """Two layers of two kv heads and four heads with five queries each."""
    return honest.copy("small", tmp_path)


def peak(path: Path) -> tuple[OutputAudit, int]:
    """An audit without the input, and the most memory that it had."""
    audit([path])
    tracemalloc.start()
    try:
        [found] = audit([path]).outputs
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refuted(job: Job, words: str, *, alone: bool) -> None:
    """The input refutes it in these words; without it, they are said if `alone` or it holds."""
    said = job.lines(against=True)
    assert re.search(words, said, re.M), said
    said = job.lines()
    assert bool(re.search(words, said, re.M)) == alone, said
    assert alone or not said


def change(job: Job, *changes: Any) -> None:
    """Forge an output by changes as those of `forgeries`."""
    for each in changes:
        forge(job.output, say=each.change) if isinstance(each, Say) else forge(job.output, each)


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refuted(name: str, honest: Honest, tmp_path: Path) -> None:
    forgery = FORGERIES[name]
    job = honest.copy(forgery.made, tmp_path)
    forge(job.output, forgery.edit, forgery.say)
    refuted(job, forgery.words, alone=forgery.alone)
    assert peak(job.output)[1] < 2_000_000


@pytest.mark.parametrize("which", ["threes", "by layer", "at cap"])
def test_the_forger_knows_the_format(which: str, honest: Honest, tmp_path: Path) -> None:
    job = honest.copy(which, tmp_path)
    good = job.output.read_bytes()
    forge(job.output)
    assert job.output.read_bytes() == good
    assert job.check(against=True).holds


def test_any_row_starts_end_in_a_verdict(job: Job) -> None:
    good, rng = job.output.read_bytes(), np.random.default_rng(3)
    right = opened(job.output)[1]["layers.0.indptr"]
    pool = [0, 1, -1, 2, int(right[1]), int(right[-1]), EDGE - 1, -EDGE, 1 << 31, 1 << 62]
    for _ in range(40):
        wrong = rng.choice(np.array(pool, np.int64), 4)
        wrong[0] *= int(rng.integers(2))
        job.output.write_bytes(good)
        change(job, new("0.indptr", lambda _, to=wrong: to))
        assert not job.check(against=True).holds, wrong


def test_one_arbitrary_key_is_told(small: Job) -> None:
    """It holds, since nothing is claimed; the verdict says that nothing is."""
    good = audit([small.output], [small.source]).outputs[0]
    assert (good.rows_over_budget, good.total, good.eps) == (0, 2 * 2 * 24, 0.1)
    assert 0.05 < good.worst_tail_mass <= 0.1
    before = said("verify", small.output, "--against", small.source)
    assert before.code == 0

    change(small, keep_only([17]), option("max_keep", 1))
    found = small.check(against=True)
    assert found.holds
    assert (found.kept, found.total) == (4, 96)
    assert (found.rows_over_budget, found.rows, found.worst_tail_mass) == (40, 40, 1.0)
    after = said("verify", small.output, "--against", small.source)
    assert after.code == 0
    assert "max_keep = 1, " in after.out
    assert after.out.endswith(": kept 4 of 96 keys, 40 of 40 rows over eps, worst tail mass 1\n")
    assert f"kept {good.kept} of 96 keys, 0 of 40 rows over eps, worst tail mass 0" in before.out
    [told] = answered("verify", small.output)["outputs"]
    assert (told["eps"], told["options"]["max_keep"]) == (0.1, 1)
    assert (told["kept"], told["total"]) == (4, 96)
    assert (told["rows_over_budget"], told["worst_tail_mass"]) == (40, 1.0)


@pytest.mark.parametrize("max_keep", [1, 3, 0.2, 0.041])
@pytest.mark.parametrize("budget", [0.0, 1e-9, 0.02])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_sets_over_budget_are_at_the_cap(
    tmp_path: Path, budget: float, max_keep: float, granularity: str
) -> None:
    shape = {"m": 5, "metadata": {"causal_offset": "3"}}
    job = Job(tmp_path, eps=budget, max_keep=max_keep, granularity=granularity, cache=shape)
    assert not job.lines(against=True)
    assert job.check().rows_over_budget > 0


@pytest.mark.parametrize("layer", [0, 1])
def test_the_worst_and_the_number_of_rows_are_of_all_layers(
    honest: Honest, tmp_path: Path, layer: int
) -> None:
    def edit(arrays: Arrays) -> None:
        for i in range(2):
            mass = np.full((4, 5), 0.375 if i == layer else 0.25, "<f4")
            mass[i, :2] = np.nextafter(np.float32(0.01), np.float32(0))  # within eps
            arrays[f"layers.{i}.tail_mass_upper"] = mass
            arrays[f"layers.{i}.tail_mass_lower"] = mass / 2

    job = honest.copy("at cap", tmp_path)
    forge(job.output, edit)
    found = job.check()
    assert found.holds
    assert (found.worst_tail_mass, found.rows_over_budget, found.rows) == (0.375, 36, 40)
    assert (found.kept, found.total, found.lower_bounds) == (20, 96, 4)


def test_positions_that_make_no_sense_are_told_once(honest: Honest, tmp_path: Path) -> None:
    job = honest.copy("by layer", tmp_path)
    change(job, new("0.indices", lambda kept: kept[::-1]))
    [finding] = job.check().findings
    assert str(finding) == "layers.0.indices: layer 0: not ascending positions from 0 to 23"


def test_a_head_below_the_cap_beside_one_that_is_over(tmp_path: Path) -> None:
    """The cap is one of each head."""
    rng = np.random.default_rng(2)
    shape = {"key": (2, 24, 4), "value": (2, 24, 4), "query": (2, 5, 4)}
    arrays = {role: rng.standard_normal(size) for role, size in shape.items()}
    arrays["key"][0] *= 20  # sharp; the other is flat
    tensors = {f"layers.0.{role}": tensor(array, "F32") for role, array in arrays.items()}
    job = Job.of(tmp_path, safetensors_bytes(tensors, None))
    job.prune("--eps", "0.05", "--max-keep", "9")
    first, second = np.diff(opened(job.output)[1]["layers.0.indptr"])
    assert first < second == 9
    found = job.check(against=True)
    assert found.holds
    assert found.rows_over_budget > 0


@pytest.mark.parametrize("n", MANY_KEYS)
def test_as_many_keys_as_nothing_speaks_against(small: Job, n: int) -> None:
    change(small, widened if n >= 1 << 31 else lambda _: None, claim_keys(n))
    found, most = peak(small.output)
    assert most < 2_000_000
    assert found.holds, found.findings
    assert found.total == 4 * n


def test_findings_are_counted_when_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("certk_rs._audit.report.MOST_FINDINGS", 7)
    job = Job(tmp_path, cache={"m": 5, "layers": 1})
    change(job, new("0.tail_mass_upper", lambda masses: masses * np.nan))
    found = job.check()
    assert (len(found.findings), found.more_findings, found.found) == (7, 13, 20)
    assert not found.holds
    assert MOST_FINDINGS > 1000
    monkeypatch.setattr("certk_rs._cli.verify._SHOWN_FINDINGS", 5)
    assert "... and 15 more\n" in said("verify", job.output).out


# ------------------------------------------------------------------------------- names and layouts


def check_told(job: Job, words: str, right: Any, wrong: Any, end: str) -> None:
    """An output holds for who says `right`, and nobody else: here, and as a command."""
    for against in (False, True):
        assert job.lines(against=against) == words
        assert job.check(against=against, **right).holds
        assert end in str(job.check(against=against, **wrong).findings[0])
    command = ("verify", job.output, "--against", job.source)
    ended = said(*command)
    assert (ended.code, words in ended.out) == (1, True)
    [(option, value)] = right.items()
    assert certk(*command, f"--{option}", value) == 0
    assert not ck.verify(job.output, job.source).holds
    assert ck.verify(job.output, job.source, **right).holds


def test_key_and_value_exchanged(tmp_path: Path) -> None:
    names = "layers.{i}.{value|key|query}"
    job = Job(tmp_path, names=names, cache={"m": 5})
    other = {"names": "layers.{i}.{key|value|query}"}
    check_told(
        job,
        f"metadata certk: its names {names!r} are not those of its input: by them 'layers.0.key' "
        "is the value of layer 0, by those of the input the key of layer 0; "
        f"give --names {names!r} if they are",
        {"names": names}, other, "; --names 'layers.{i}.{key|value|query}' says so",
    )  # fmt: skip


def test_layers_left_out_or_renumbered(tmp_path: Path) -> None:
    names = "layers.1{i}.{key|value|query}"
    job = Job(tmp_path, names=names, cache={"m": 5, "layers": 12})
    words = (
        "by them 'layers.0.key' is no part of the cache, by those of the input the key of layer 0"
    )
    assert words in job.lines(against=True)
    found = job.check(against=True, names=names)
    assert found.holds
    assert found.names == names
    assert set(found.covered) == {
        f"layers.1{i}.{r}" for i in (0, 1) for r in ("key", "query", "value")
    }
    assert len(found.not_covered) == 30
    text = said("verify", job.output, "--against", job.source, "--names", names).out
    assert "covers 6 of the 36 tensors of its input" in text
    assert "not covered: 'layers.0.key', 'layers.0.query', 'layers.0.value', ..." in text
    [output] = answered("verify", job.output, "--names", names)["outputs"]
    assert (len(output["covered"]), len(output["not_covered"])) == (6, 30)
    assert output["names"] == names


@pytest.mark.parametrize(
    ("other", "names", "words"),
    [
        ("other.{i}.{role}", "layers.{i}.{key|value|query}", ""),
        ("other.{i}.{role}", "other.{i}.{key|value|query}", "its names"),
        ("layer.{i}.{role}", "layer.{i}.{key|value|query}", "fit .*: say which with --names"),
    ],
)
def test_names_of_two_caches_are_for_the_caller_to_confirm(
    tmp_path: Path, other: str, names: str, words: str
) -> None:
    tensors = cache_tensors(layers=1) | cache_tensors(layers=1, seed=1, names=other)
    job = Job.of(tmp_path, safetensors_bytes(tensors, None))
    job.prune("--names", names)
    found = job.check(against=True)
    assert found.holds == (not words)
    assert re.search(words, job.lines())
    assert len(found.covered) == len(found.not_covered) == 3
    assert job.check(against=True, names=names).holds


def test_names_where_none_is_known(tmp_path: Path) -> None:
    names = "m.{i}.{key|value|query}"
    job = Job(tmp_path, names=names, cache={"m": 5, "names": "m.{i}.{role}"})
    words = "by them 'm.0.key' is the key of layer 0, by those of the input no part of the cache"
    assert words in job.lines()
    assert job.check(against=True, names=names).holds


def test_other_tensors_are_told_and_no_finding(tmp_path: Path) -> None:
    tensors = cache_tensors(layers=1) | {"mask\x1b[2J": tensor(np.zeros(3), "F32")}
    job = Job.of(tmp_path, safetensors_bytes(tensors, None))
    job.prune()
    code, text, _ = said("verify", job.output, "--against", job.source)
    assert code == 0
    assert "covers 3 of the 4 tensors of its input" in text
    assert r"not covered: 'mask\x1b[2J'" in text
    assert "\x1b" not in text


def test_a_pattern_that_is_none_is_refused(job: Job) -> None:
    with pytest.raises(CertkError, match="--names 'x': give one"):
        audit([job.output], names="x")
    assert certk("verify", job.output, "--names", "x") == 2


SQUARE = {"kv_heads": 2, "heads": 4, "m": 24, "n": 24}


def test_the_layout_is_that_of_the_input(tmp_path: Path) -> None:
    """Two kv heads of 24 keys, certified as 24 kv heads of two: true of another cache."""
    job = Job(tmp_path, cache=SQUARE, layout="nhd")
    words = "metadata certk: its layout nhd is not that of its input, which is hnd; "
    right, wrong = {"layout": "nhd"}, {"layout": "hnd"}
    end = "which is hnd; --layout hnd says so"
    check_told(job, f"{words}give --layout nhd if it is", right, wrong, end)
    with pytest.raises(CertkError, match="layout is 'dnh': give hnd"):
        audit([job.output], layout="dnh")


def test_the_layout_that_is_usual_is_refused_where_another_is_given(tmp_path: Path) -> None:
    job = Job(tmp_path, cache=SQUARE, layout="hnd")
    for against in (False, True):
        assert job.check(against=against).holds
        assert job.check(against=against, layout="hnd").holds
        [finding] = job.check(against=against, layout="nhd").findings
        assert "its layout hnd is not that of its input, which is nhd" in str(finding)


@pytest.mark.parametrize(
    ("sizes", "tensor", "layout"),
    [
        ((24, 24, 2, 2), "key", "hnd"),
        ((24, 24, 2, 2), "key", "nhd"),
        ((4, 8, 16, 8), "query", "hnd"),
        ((4, 8, 16, 8), "query", "nhd"),
        ((4, 8, 4, 8), "query", "hnd"),
    ],
)
def test_shapes_that_look_like_either_layout(
    tmp_path: Path, sizes: tuple[int, ...], tensor: str, layout: str
) -> None:
    """They are refused by prune, too, until somebody says which it is."""
    shape = dict(zip(("kv_heads", "heads", "m", "n"), sizes, strict=True))
    with pytest.raises(CertkError, match="--layout"):
        Job(tmp_path / "refused", cache=shape)
    job = Job(tmp_path, cache=shape, layout=layout)
    for against in (False, True):
        said = job.lines(against=against)
        assert said.startswith(f"metadata certk: its input: tensor 'layers.0.{tensor}'"), said
        assert "--layout hnd if" in said
        assert job.check(against=against, layout=layout).holds


def test_a_layout_that_alone_fits_need_not_be_given(tmp_path: Path) -> None:
    """(rows, heads, d) of few queries: 24 kv heads would not go into 3 query heads."""
    tensors = cache_tensors(layers=1, kv_heads=24, heads=3, m=4, n=2)
    job = Job.of(tmp_path, safetensors_bytes(tensors, None))
    job.prune("--layout", "nhd")
    for layout in (None, "nhd"):
        assert job.check(against=True, layout=layout).holds
    assert not job.check(against=True, layout="hnd").holds


# ---------------------------------------------------------------------------------- the certificate


def leaves(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All leaves of a certificate, each with its place."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from leaves(value, (*place, key))
        else:
            yield (*place, key), value


NONSENSE = [
    *[-1, 0, 1, 2, 7, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, EDGE - 1, EDGE, 1 << 64, -EDGE],
    *["@1" + "0" * 400, "@1" + "0" * 4200, "@1" + "0" * 5000, "@1e999", "@-1e999", "@NaN"],
    *[0.5, 1.0, -0.0, 5e-324, 1e308, True, None, "", "1", "nan", [], {}, [1], {"1": 1}],
    *["\ud800", "\0", "layers.{i}.{key|value|query}", "@" + "[" * 900 + "]" * 900],
]
# Nobody can know who wrote it; and a set may keep to other options by chance.
HARMLESS = {("library",), *(("options", name) for name in ("max_keep", "keep_last", "out_tol"))}


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.heavy)])
def test_any_value_at_any_place_ends_in_a_verdict(tmp_path: Path, step: int) -> None:
    """With the input a harmless one passes, and no other; of the values every sixth, or all."""
    job = Job(tmp_path, cache={"layers": 1, "kv_heads": 1, "heads": 2}, keep_last=1)
    good, body = job.output.read_bytes(), json.loads(opened(job.output)[0]["certk"])
    passed = set()
    for number, (place, value) in enumerate(leaves(body)):
        # Tensors have many like fields, of which each is given fewer values.
        every = 4 * step if place[0] in ("inputs", "outputs") else step
        for other in NONSENSE[number % every :: every]:
            if place == ("sha256",) or (other == value and type(other) is type(value)):
                continue

            def say(body: Body, place: Any = place, other: Any = other) -> None:
                for key in place[:-1]:
                    body = body[key]
                body[place[-1]] = other

            job.output.write_bytes(good)
            forge(job.output, say=say)
            alone, with_input = job.check(), job.check(against=True)
            assert alone.holds or not with_input.holds
            if with_input.holds:
                passed.add(place)
    assert {("library",)} <= passed <= HARMLESS
    assert step > 1 or passed == HARMLESS


def test_a_budget_just_met_and_just_missed(job: Job) -> None:
    _, arrays = opened(job.output)
    worst = max(float(arrays[f"layers.{i}.tail_mass_upper"].max()) for i in range(2))
    change(job, eps(worst))
    assert job.check().holds
    assert job.check().rows_over_budget == 0
    change(job, eps(math.nextafter(worst, 0.0)))
    [finding] = job.check().findings
    assert "without a max_keep to excuse it" in str(finding)


def test_options_that_were_kept_to(small: Job) -> None:
    """Those of the set that `forgeries.BROKEN_OPTIONS` are tried on."""
    change(small, keep_only([0, 1, 4, 9, 23]))
    for allowed in (
        {"max_keep": 5, "keep_first": 2, "keep_last": 1},
        {"max_keep": 5.01 / 24, "keep_first": 0, "keep_last": 0},
    ):
        forge(small.output, say=lambda body, allowed=allowed: body["options"].update(allowed))
        assert small.check(against=True).holds


@pytest.mark.parametrize(
    ("scale", "exact"), [("-1e308", False), ("1e308", False), ("1e-320", True), ("0.0", True)]
)
def test_scores_beyond_arithmetic_confirm_nothing(small: Job, scale: str, exact: bool) -> None:
    """Scores that overflow to -inf must not pass for keys that are not seen, and weigh nothing."""
    write_cache(small.source, m=5, metadata={"scale": scale})
    content = small.source.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]

    def edit(arrays: Arrays) -> None:
        keep_only([17])(arrays)
        for i in range(2):
            name = f"layers.{i}.tail_mass_upper"
            arrays[name] = np.full_like(arrays[name], 23 / 24 + 1e-7 if exact else 0.0)

    def say(body: Body) -> None:
        body["scales"] = {"0": float(scale), "1": float(scale)}
        body["input_headers"] = [hashlib.sha256(header).hexdigest()]
        body["options"]["max_keep"] = 1

    forge(small.output, edit, say)
    found = small.check(against=True)
    assert found.holds == exact, found.findings
    assert found.confirmed_rows == (40 if exact else 0)


def test_rows_that_arithmetic_cannot_tell_may_lose_everything(tmp_path: Path) -> None:
    """Hot keys may lose what they like, but the worst of it is not that of the other rows."""
    shape = {"m": 5, "dtype": "F32", "spread": 1.0}
    job = Job(tmp_path, eps=0.05, cache=shape, hot=0.6, rest="file", proof="none")
    before = job.check(against=True)
    assert before.worst_tail_mass is not None
    assert before.worst_tail_mass < 1
    # One row of forty, whose scores nobody can tell apart.
    far = put("1.query", (0, 2, 3), lambda row: row * np.float32(1e18))
    forge_input(job.source, job.output, far)
    after = job.check(against=True)
    assert after.holds
    assert after.worst_tail_mass == 1.0


def test_a_certificate_changed_afterwards(job: Job) -> None:
    content = job.output.read_bytes()
    place = content.index(b'\\"sha256\\":\\"', content.index(b'\\"scales\\"')) + 13
    job.output.write_bytes(content[:place] + b"0" * 64 + content[place + 64 :])
    refuted(job, "^metadata certk: its SHA-256 is not that of its text", alone=True)


def test_a_set_that_lacks_a_short_block_is_not_at_a_cap(tmp_path: Path) -> None:
    """One block more would be more keys than there are, but no cap excuses the loss."""
    job = Job(tmp_path, eps=0.9, block_size=20, proof="none", cache={"layers": 1})
    assert job.check(against=True).holds
    forge(job.output, say=lambda body: body["eps"].update({"0": [1e-3, 1e-3]}))
    refuted(job, "tail mass in .* is refuted", alone=False)


def test_a_header_of_another_form_or_with_other_metadata(job: Job) -> None:
    """As valid as the canonical one, but there is one only."""
    content = job.output.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = content[8:start], content[start:]
    job.output.write_bytes(raw_file(header + b" " * 8, data))
    refuted(job, "^header: is not in canonical form from byte 0 on$", alone=True)
    header = header.replace(b'{"__metadata__":{', b'{"__metadata__":{"scale":"1",', 1)
    job.output.write_bytes(raw_file(header, data))
    refuted(job, "^metadata: foreign key 'scale'$", alone=True)


def test_all_that_does_not_hold_is_told(job: Job) -> None:
    """Names that nobody gave do not keep the rest from being judged, nor one output another."""
    whole = job.output.with_name("whole.safetensors")
    shutil.copy(job.output, whole)
    change(job, scale_masses(0, slice(None), 0.5, 0.5))
    report = audit([job.output, whole], [job.source], names="layers.1{i}.{key|value|query}")
    assert not report.holds
    said = "\n".join(map(str, report.outputs[0].findings))
    assert "its names" in said
    assert "layer 0, head 0, query 0: tail mass in" in said
    report = audit([job.output, whole], [job.source])
    assert [output.holds for output in report.outputs] == [False, True]
    assert not report.holds


def test_rows_are_placed_beyond_the_first_block(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certk_rs._audit.truth._BLOCK", 48)
    change(job, scale_masses(0, (4, 3), 0.5, 0.5))
    [finding] = job.check(against=True).findings
    assert finding.where == "layers.0.tail_mass_upper[4, 3]"
    assert "layer 0, head 4, query 3: tail mass in" in finding.what


def test_text_that_is_nested_too_deep(job: Job) -> None:
    good = job.output.read_bytes()
    for depth in (100, 900, 950, 970, 980, 990, 1000, 5000, 100_000):
        nest = "[" * depth + "]" * depth
        job.output.write_bytes(good)
        change(job, field(library="@" + nest))
        assert not job.check().holds
        for entry in (f'"dtype":"F32","shape":{nest}', f'"dtype":{nest},"shape":[1]'):
            job.output.write_bytes(raw_file(f'{{"x":{{{entry},"data_offsets":[0,4]}}}}', bytes(4)))
            assert job.check().findings[0].where == "file"


@pytest.mark.parametrize("shape", [f"[1{'0' * 4000},1{'0' * 4000}]", f"[{'9,' * 300_000}9]"])
def test_a_product_of_sizes_that_nobody_can_print(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        raw_file(f'{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}', bytes(4))
    )
    [output] = audit([path]).outputs
    assert "is not a list of sizes" in str(output.findings[0])


# --------------------------------------------------------------------------------------- the proofs


def equal_weights(arrays: Arrays, layer: int, value: float, rows: int) -> None:
    """The same weight for all rows."""
    arrays[f"layers.{layer}.lower_bound_rows"] = np.arange(rows)
    arrays[f"layers.{layer}.lower_bound_weights"] = np.full(rows, value, "<f4")


def masses(cache: Arrays, layer: int) -> np.ndarray:
    """The softmax of every row (heads, m, n), 4 heads over 2 kv heads, d = 4."""
    shapes = (("query", 5), ("key", 24))
    q, k = (cache[f"layers.{layer}.{role}"].reshape(-1, n, 4) for role, n in shapes)
    scores = 0.5 * np.einsum("hmd,hnd->hmn", q, np.repeat(k, 2, axis=0))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("kept", "last"), [([3, 7, 11, 17, 20], 0), ([7, 20, 21, 22, 23], 4), ([2, 9, 21, 22, 23], 3)]
)
def test_raised_lower_bounds_under_a_cap(small: Job, kept: list[int], last: int) -> None:
    """Arbitrary keys, and true masses: what they lose is the budget, and proves less than eps.

    Forced keys cannot be dropped, wherever they are.
    """
    cache = write_cache(small.source, m=5)
    soft = [masses(cache, i) for i in range(2)]
    lost = [np.delete(rows, kept, axis=-1).sum(axis=-1) for rows in soft]
    free = 24 - last
    mixed = [np.sort(rows[..., :free].reshape(2, 10, free).sum(axis=1), axis=1) for rows in soft]

    def best(budgets: list[np.ndarray]) -> np.ndarray:
        """The largest bounds that equal weights prove, by layer and kv head."""
        sums = [np.cumsum(rows, axis=1) for rows in mixed]
        return np.array([24 - (s <= b[:, None]).sum(1) for s, b in zip(sums, budgets, strict=True)])

    right = best([np.maximum(rows, 0.1).reshape(2, 10).sum(axis=1) for rows in lost])
    assert (right > max(1, last)).any()
    assert (right <= 5).all()
    assert (right < best([np.ones(2)] * 2)).all()

    def edit(arrays: Arrays) -> None:
        keep_only(kept)(arrays)
        for i in range(2):
            arrays[f"layers.{i}.tail_mass_upper"] = (lost[i] * (1 + 2e-7)).astype("<f4")
            arrays[f"layers.{i}.tail_mass_lower"] = (lost[i] * (1 - 2e-7)).astype("<f4")
            arrays[f"layers.{i}.lower_bound"] = bounds[i]
            equal_weights(arrays, i, 0.25, 20)

    bounds = right
    forge(small.output, edit, lambda body: body["options"].update(max_keep=5, keep_last=last))
    assert small.check(against=True).holds, small.lines(against=True)
    assert small.check().rows_over_budget > 0
    bounds = np.minimum(right + 1, 5)
    forge(small.output, edit)
    for i in range(2):
        for group in np.flatnonzero(right[i] < 5):
            words = (
                rf"^layers.{i}.lower_bound\[{group}\]: layer {i}, kv head {group}: \d is not proven"
            )
            refuted(small, words, alone=False)


@pytest.mark.parametrize("factor", [2.0**-120, 2.0**120, 1.0])
def test_weights_count_by_their_ratio(job: Job, factor: float) -> None:
    """Any multiple of the mixture proves the same."""
    for i in range(2):
        change(job, new(f"{i}.lower_bound_weights", lambda weights: weights * factor))
    assert job.check(against=True).holds


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 1e-40, 1.0, 2.0**127])
def test_weights_that_are_all_the_same(job: Job, value: float) -> None:
    """They prove less, and none of them breaks the arithmetic; 0 stands for rows without any."""
    expected = {}
    for this in (1.0, value):

        def edit(arrays: Arrays, this: float = this) -> None:
            for i in range(2):
                equal_weights(arrays, i, this, 30)
                if not this:
                    no_proof(arrays, i)

        forge(job.output, edit)
        found = job.check(against=True)
        expected[this] = [str(finding) for finding in found.findings]
        assert all("is not proven by the recorded weights" in line for line in expected[this])
        assert found.confirmed_rows == found.rows
        assert found.confirmed_lower_bounds == found.lower_bounds - len(expected[this])
    if value:
        assert expected[value] == expected[1.0]
    else:
        assert len(expected[value]) == 6
    assert len(expected[1.0]) > 0


# ------------------------------------------------------------------------------ files that change


@pytest.mark.parametrize("which", ["output", "source"])
@pytest.mark.parametrize("when", ["checking", "recomputing"])
def test_a_file_that_changes_meanwhile(job: Job, which: str, when: str) -> None:
    """The bytes that were judged are those that were hashed."""
    path = getattr(job, which)

    def tell(label: str, done: int, _total: int) -> None:
        if label.startswith(when) and done == 1:
            with path.open("r+b") as file:
                file.write(path.read_bytes()[:9])
            os.utime(path, ns=(1, 1))

    assert audit([job.output], [job.source]).holds
    [output] = audit([job.output], [job.source], tell).outputs
    [finding] = output.findings
    assert finding.where == "file"
    assert "was changed while it was being used" in finding.what


def test_an_input_that_is_another_meanwhile(job: Job, tmp_path: Path) -> None:
    """Nothing of it is read as what it was."""
    other = tmp_path / "other.safetensors"
    write_cache(other, m=2, n=3, layers=1)

    def tell(label: str, _done: int, _total: int) -> None:
        if label.startswith("checking"):
            shutil.copy(other, job.source)

    [output] = audit([job.output], [job.source], tell).outputs
    [finding] = output.findings
    assert "was changed while it was being used" in finding.what
