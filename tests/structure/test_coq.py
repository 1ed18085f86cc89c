"""Theorems in `proofs/`, checked by Coq where it is installed, and their names on the page.

docs/soundness.md names every theorem where it uses it. A lemma is a step of theorems and has no
name there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from budget_page import PAGE
from repository import ROOT

COQ = shutil.which("coqc")
FILES = {path.name: path.read_text() for path in sorted((ROOT / "proofs").glob("*.v"))}
# The axioms on which Coq's own real numbers rest.
REALS = {
    "ClassicalDedekindReals.sig_forall_dec",
    "ClassicalDedekindReals.sig_not_dec",
    "Classical_Prop.classic",
    "FunctionalExtensionality.functional_extensionality_dep",
}
# `make prove` says so where it is missing; a run of all tests goes on.
needs_coq = pytest.mark.skipif(
    COQ is None, reason="coqc is not installed; on Debian: apt-get install coq"
)


def theorems(files: dict[str, str]) -> set[tuple[str, str]]:
    """Return the theorems of files, each beside the file's name."""
    return {
        (name, theorem)
        for name, text in files.items()
        for theorem in re.findall(r"^Theorem (\w+)", text, re.M)
    }


def mentions(page: str) -> list[tuple[str, str]]:
    """Return the theorems that a page names, as in (Coq: `file.v first second`)."""
    return [
        (name, theorem)
        for name, listed in re.findall(r"Coq:\s+`(\w+\.v)((?:\s+\w+)+)`", page)
        for theorem in listed.split()
    ]


def run(folder: Path, *command: str) -> str:
    """Return the output of a program of Coq, which must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assumed(folder: Path, files: dict[str, str]) -> set[str]:
    """Return the axioms on which theorems rest, once Coq has checked all proofs of their files."""
    for name, text in files.items():
        (folder / name).write_text(text)
    for name in run(folder, "coqdep", "-Q", ".", "Certk", "-sort", *files).split():
        run(folder, "coqc", "-q", "-Q", ".", "Certk", name)
    modules = " ".join(Path(name).stem for name in files)
    every = ", ".join(f"@{Path(name).stem}.{theorem}" for name, theorem in theorems(files))
    asked = f"From Certk Require {modules}. Definition every := ({every}). Print Assumptions every."
    (folder / "asked.v").write_text(asked)
    told = run(folder, "coqc", "-q", "-Q", ".", "Certk", "asked.v")
    return set(re.findall(r"^([\w.']+)(?= :|$)", told, re.M))


def test_the_page_names_every_theorem_once() -> None:
    named = mentions(PAGE.read_text())
    assert len(named) == len(set(named))
    assert set(named) == theorems(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_where_it_is_used(name: str) -> None:
    head = re.match(r"\(\*(.*?)\*\)", FILES[name], re.S)
    assert head
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    used = re.findall(r'under "([^"]+)"', " ".join(head[1].split()))
    named = [text.splitlines()[0] for text in sections if name in dict(mentions(text))]
    assert used == named
    # A file that the page does not name is a part of another.
    assert named or any(re.search(rf"\bCertk\.{name[:-2]}\b", text) for text in FILES.values())


@needs_coq
def test_theorems_rest_on_the_axioms_of_the_reals_alone(tmp_path: Path) -> None:
    assert assumed(tmp_path, FILES) == REALS


@needs_coq
def test_a_gap_in_a_proof_is_seen(tmp_path: Path) -> None:
    gap = "Lemma gap : 0 = 1. Admitted.\nTheorem wrong : 1 = 0. symmetry. exact gap. Qed.\n"
    assert assumed(tmp_path, {"a.v": gap}) == {"a.gap"}
    with pytest.raises(AssertionError, match="Error"):
        assumed(tmp_path, {"a.v": "Theorem wrong : 1 = 0. reflexivity. Qed.\n"})
