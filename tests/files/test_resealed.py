"""A thousand outputs changed at random and sealed anew: two verifiers that share no code agree.

Neither gives up with an error of its own, and what holds with the input holds without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from certk_rs.audit import audit
from resealed import KINDS, mutated, sound
from second_verifier import second_verdict

COUNT, BATCH = 1000, 100


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes]]:
    return sound(tmp_path_factory.mktemp("sound"))


def test_they_are_sound_before(outputs: dict[str, tuple[bytes, bytes]], tmp_path: Path) -> None:
    for name, files in outputs.items():
        source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
        source.write_bytes(files[0])
        output.write_bytes(files[1])
        [found] = audit([output], [source]).outputs
        assert found.holds, (name, found.findings)
        assert second_verdict(output, source)[0] == 0, name


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.heavy if first else ())
        for first in range(0, COUNT, BATCH)
    ],
)
def test_two_verifiers_agree_on_what_was_changed(
    first: int, outputs: dict[str, tuple[bytes, bytes]], tmp_path: Path
) -> None:
    names, holding, seen = sorted(outputs), 0, set()
    for seed in range(first, first + BATCH):
        job, done = mutated(outputs[names[seed % len(names)]], tmp_path, seed)
        seen |= {kind.__name__ for kind in KINDS if kind.__name__ in done}
        layout = {3: "hnd", 7: "nhd"}.get(seed % 10)
        [found] = audit([job.output], [job.source], threads=1, layout=layout).outputs
        [alone] = audit([job.output], threads=1, layout=layout).outputs
        code, said = second_verdict(job.output, job.source, layout)
        what = f"seed {seed}, {names[seed % len(names)]}, {layout}: {done}\n{said}{found.findings}"
        assert found.holds == (code == 0), what
        assert alone.holds or not found.holds, f"{what}\n{alone.findings[:3]}"
        assert (found.error, alone.error) == (None, None), what
        assert "judging it ended" not in f"{found.findings}{alone.findings}", what
        holding += found.holds
    # Enough of both, or the agreement would say nothing.
    assert BATCH // 10 <= holding <= BATCH // 2
    assert len(seen) >= len(KINDS) - 1
