"""Archives before they are published, and promises of the manifests."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import private_paths
import wheels

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BILL = "certk_rs-1.dist-info/sboms/certk-py.cyclonedx.json"


def bill(root: Path) -> dict[str, Any]:
    """As maturin writes it for sources in a folder."""
    ours = f"path+file://{root.as_posix()}/crates/certk-py#0.2.0"
    return {
        "bomFormat": "CycloneDX",
        "serialNumber": "urn:uuid:7",
        "metadata": {
            "timestamp": "2026-01-01T00:00:00Z",
            "component": {
                "name": "certk-py",
                "bom-ref": ours,
                "purl": f"pkg:cargo/x?u=file://{root}",
            },
        },
        "components": [{"name": "rayon", "bom-ref": "registry+x#rayon@1", "licenses": []}],
        "dependencies": [{"ref": ours, "dependsOn": ["registry+x#rayon@1"]}],
    }


def made_wheel(path: Path, root: Path, code: bytes = b"\x7fELF", **more: bytes) -> Path:
    members = {"certk_rs/_native.abi3.so": code, BILL: json.dumps(bill(root)).encode(), **more}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        rows = "".join(f"{n},sha256=x,{len(d)}\n" for n, d in members.items())
        archive.writestr("certk_rs-1.dist-info/RECORD", rows + "certk_rs-1.dist-info/RECORD,,\n")
    return path


def test_a_bill_names_no_folder_and_says_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "sources"
    wheel = made_wheel(tmp_path / "x.whl", root)
    assert private_paths.found(wheel, root)
    private_paths.clean(wheel, root)
    assert not private_paths.found(wheel, root)
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(BILL)
        rows = csv.reader(io.StringIO(archive.read("certk_rs-1.dist-info/RECORD").decode()))
        record = {row[0]: row[1:] for row in rows}
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert record[BILL] == [f"sha256={digest}", str(len(data))]
    assert record["certk_rs/_native.abi3.so"] == ["sha256=x", "4"]
    told = json.loads(data)
    assert "serialNumber" not in told
    assert "timestamp" not in told["metadata"]
    assert told["components"] == bill(root)["components"]
    [tie] = told["dependencies"]
    # Names that belong together still do.
    assert tie["ref"] == told["metadata"]["component"]["bom-ref"]
    assert tie["ref"] == "path+file:///certk_rs/crates/certk-py#0.2.0"


def test_two_builds_in_two_folders_are_one_wheel(tmp_path: Path) -> None:
    made = [made_wheel(tmp_path / f"{k}.whl", tmp_path / str(k)) for k in range(2)]
    assert made[0].read_bytes() != made[1].read_bytes()
    for k, wheel in enumerate(made):
        private_paths.clean(wheel, tmp_path / str(k))
    contents = []
    for wheel in made:
        with zipfile.ZipFile(wheel) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    "path", ["/home/somebody/x.rs", "/Users/a/.cargo/x.rs", "C:\\Users\\a\\x.rs", "/root/.cargo/x"]
)
def test_machine_code_that_names_a_home_is_found(tmp_path: Path, path: str) -> None:
    code = b"\0\1" + path.encode() + b"\0"
    [said] = private_paths.found(
        made_wheel(tmp_path / "x.whl", Path("/certk_rs/nowhere"), code), Path("/no/such/folder")
    )
    assert said == f"certk_rs/_native.abi3.so: {path}"


def test_pages_may_speak_of_homes_but_not_name_this_folder(tmp_path: Path) -> None:
    page = {"certk_rs/a.py": b"# as in /home/you/cache"}
    wheel = made_wheel(tmp_path / "x.whl", Path("/certk_rs"), **page)
    assert not private_paths.found(wheel, Path("/no/such/folder"))
    own = {"certk_rs/a.py": f"# {ROOT}/src".encode()}
    assert private_paths.found(made_wheel(tmp_path / "y.whl", Path("/certk_rs"), **own), ROOT)


def test_the_compiler_is_told_all_folders_of_this_machine() -> None:
    flags = wheels.environment()["CARGO_ENCODED_RUSTFLAGS"].split("\x1f")
    assert f"--remap-path-prefix={ROOT}=certk_rs" in flags
    # The last one that fits holds, so that what lies in another folder comes after it.
    assert len([f for f in flags if f.startswith("--remap-path-prefix=")]) == 3


def test_zig_is_found_beside_the_python_that_builds() -> None:
    first, _, _ = wheels.environment()["PATH"].partition(os.pathsep)
    assert first == str(Path(sys.executable).parent)


def test_who_is_left_without_a_wheel_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(command: list[str], **_: object) -> None:
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        python = command[command.index("--interpreter") + 1] if "--interpreter" in command else None
        [tags] = [tags for tags, each in wheels.PYTHONS.items() if each == python]
        made_wheel(out / f"certk_rs-1-{tags}-any.whl", Path("/certk_rs/nowhere"))

    monkeypatch.setattr(wheels, "environment", dict)
    monkeypatch.setattr(wheels.shutil, "which", {"python3.14t": "python3.14t"}.get)
    monkeypatch.setattr(wheels.subprocess, "run", built)
    for target, count in (("x86_64-unknown-linux-gnu", 3), ("aarch64-apple-darwin", 2)):
        monkeypatch.setattr(sys, "argv", ["wheels.py", target, "--out", str(tmp_path / target)])
        wheels.main()
        assert len(list((tmp_path / target).glob("*.whl"))) == count
    [line] = [each for each in capsys.readouterr().out.splitlines() if "NOT BUILT" in each]
    assert line.startswith("aarch64-apple-darwin, cp315-abi3.abi3t: NOT BUILT, as python3.15t")


# ---------------------------------------------------------------------------------- workflows


def test_there_are_workflows() -> None:
    assert [w.name for w in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.name)
def test_actions_are_pinned_and_rights_are_few(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+?)@(\S+)( # v[\d.]+)?$", text, re.M)
    assert len(used) == text.count("uses: ")
    for action, version, named in used:
        # Its authors ask for the branch.
        if action != "pypa/gh-action-pypi-publish":
            assert re.fullmatch(r"[0-9a-f]{40}", version), action
            assert named, action
    assert re.search(r"^permissions:\n  contents: read\n\n", text, re.M)
    assert "secrets." not in text
    assert not re.search(r"https?://", text)
    # What a pusher chooses, the name of a tag or branch, is never pasted into a command.
    for line in re.findall(r"run: (.*)", text):
        assert not re.search(r"\$\{\{(?! *matrix\.)", line), line


def test_what_is_published_is_what_was_attested() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = dict(
        re.findall(r"^  ([\w-]+):\n((?:    .*\n|\n)+)", text.partition("\njobs:\n")[2], re.M)
    )
    assert {"wheels", "sdist", "attest", "publish-package", "publish-crate"} <= jobs.keys()
    for name, body in jobs.items():
        rights = "id-token: write" in body
        assert rights == (name.startswith("publish") or name == "attest"), name
        if name.startswith("publish"):
            assert "needs: attest" in body
            assert "environment: release" in body
        assert "timeout-minutes" in body


# ----------------------------------------------------------------------------------- licences


def test_licences_and_sources_of_crates_are_checked_by_cargo_deny() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    job = text.partition("\n  deny:\n")[2].partition("\n\n")[0]
    assert re.search(r"uses: EmbarkStudios/cargo-deny-action@\w{40}", job)
    told = (ROOT / "deny.toml").read_text(encoding="utf-8")
    for line in ('unknown-registry = "deny"', 'unknown-git = "deny"', "all-features = true"):
        assert f"\n{line}\n" in told
    listed = re.search(r"^allow = \[(.*?)\]", told, re.M | re.S)
    assert listed is not None
    assert not re.search("GPL|AGPL|SSPL", listed[1])
