"""Reads damaged files in this process, whose memory it limits: run as a script by a test.

    python mutation_run.py FOLDER KIND FIRST LAST

FOLDER has the sound files of KIND in `sound/KIND`. Every reader must end in a right answer or in an
error that is meant for a user, within seconds. What another command does with a file is one more
function in READERS.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import resource
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from certk_rs import CertkError, prune
from certk_rs._files.cache import Cache
from certk_rs._files.location import locate
from certk_rs._jobs.inspect import inspect_all
from certk_rs.audit import audit
from certk_rs.cli import main
from mutated_files import bombs, damage, join, split

MEMORY = 1 << 30  # bytes of address space beyond what is there before the first file
SECONDS = 10.0  # of processors
WIDTHS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "BOOL": 1}


class WrongError(Exception):
    """A reader has given an answer that is not so."""


class TooSlowError(BaseException):
    """A reader has not ended in time. No handler for exceptions may keep it."""


class Case:
    """One damaged file, and the sound one that it was."""

    def __init__(self, path: Path, sound: Path) -> None:
        self.path, self.sound, self.folder = path, sound, sound.parent.parent
        self.parts = sorted(each for each in path.parent.iterdir() if each.suffix != ".json")
        self.same = all(
            each.read_bytes() == (sound.parent / each.name).read_bytes()
            for each in path.parent.iterdir()
        )


def tensors(parts: list[Path]) -> dict[str, tuple[str, list[int], bytes]]:
    """All tensors of some files, read in the plainest way: the judge of what others read."""
    found = {}
    for part in parts:
        text, data = split(part.read_bytes())
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = (entry["dtype"], entry["shape"], data[start:stop])
    return found


def must(right: bool, what: str) -> None:
    if not right:
        raise WrongError(what)


def read_cache(case: Case, layout: str | None = None) -> None:
    """All of a cache: what is read is what is stored, and finite."""
    with Cache(case.path, layout=layout) as cache:
        facts = cache.check_values()
        stored = tensors(case.parts)
        must(set(facts) == set(stored), "tensors were made up or lost")
        for name, (dtype, shape, data) in stored.items():
            said = facts[name]
            must((said.dtype, list(said.shape)) == (dtype, shape), f"form of {name}")
            must(said.sha256 == hashlib.sha256(data).hexdigest(), f"hash of {name}")
            if dtype in WIDTHS:
                must(len(data) == math.prod(shape) * WIDTHS[dtype], f"length of {name}")
        for layer in cache.layers:
            for role, rows in (("key", layer.n), ("value", layer.n), ("query", layer.m)):
                dtype, shape, data = stored[layer.names[role]]
                kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]
                whole = np.frombuffer(data, kind).reshape(shape[-3:])
                if layer.layout == "nhd":
                    whole = whole.swapaxes(0, 1)
                if dtype != "BF16":
                    must(bool(np.isfinite(whole).all()), f"{role} is not finite")
                heads = layer.heads if role == "query" else layer.kv_heads
                must(whole.shape == (heads, rows, layer.d), f"shape of {role}")
                found = cache.read(layer, role)
                must(found.tobytes() == whole.tobytes(), f"bytes of {role}")
                part = cache.read(layer, role, slice(0, 1), rows=slice(rows // 2, None))
                must(part.tobytes() == whole[:1, rows // 2 :].tobytes(), f"rows of {role}")
        cache.file.check_unchanged(cache.file.identity)
        must(all(line.isascii() or line for line in cache.warnings), "warnings")


def read_nhd(case: Case) -> None:
    """The same, read the other way."""
    read_cache(case, "nhd")


def inspect(case: Case) -> None:
    """Headers: JSON that is JSON, tensors that are there."""
    [found] = inspect_all([locate(case.path)])
    json.dumps(found, allow_nan=False)
    if found["kind"] != "unreadable":
        must({each["name"] for each in found["tensors"]} == set(tensors(case.parts)), "names")
    if found["kind"] == "output" and found["is_ready"]:
        header = split(case.path.read_bytes())[0]
        said = json.loads(header)["__metadata__"]["certk"]
        sound = json.loads(split(case.sound.read_bytes())[0])["__metadata__"]["certk"]
        must(said == sound, "a changed certificate passes for whole")


def command(case: Case) -> None:
    """The command line: an exit code, and no word of a bug."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["inspect", str(case.path)])
    must(code in (0, 1, 2), f"exit code {code}")
    must("please report" not in err.getvalue(), err.getvalue()[-500:])
    must((code == 2) == (not out.getvalue()), "output beside an error, or none at all")


def verify_output(case: Case) -> None:
    """A damaged output is found to be one, without and with its input."""
    inputs = [case.folder / "cache" / "x.safetensors"]
    for against in ([], inputs):
        [output] = audit([case.path], against).outputs
        must(bool(output.findings) != case.same, f"findings: {list(map(str, output.findings))}")


def verify_against(case: Case) -> None:
    """A damaged input is not the one that was pruned."""
    output = case.folder / "output" / "x.safetensors"
    [found] = audit([output], [case.path]).outputs
    must(bool(found.findings) != case.same, "a damaged input passes")


PRUNED: list[dict[str, Any]] = [
    {"eps": 0.1},
    {"eps": 0.01, "granularity": "layer", "proof": "compact", "keep_last": 2},
    {"eps": 0.3, "granularity": "token", "block_size": 4},
    {"size": 0.5, "proof": "full"},
    {"out_tol": 1.0, "coverage": 0.9},
    {"eps": 0.1, "rest": "codes", "key_bits": 12, "value_bits": 4},
]


def pruned(case: Case) -> None:
    """A cache is pruned to what the audit confirms of it, or nothing is left but the refusal."""
    out = Path(f"{case.path.parent}-pruned")
    # Some way or other, but for the same file always the same.
    asked = PRUNED[zlib.crc32(case.path.read_bytes()) % len(PRUNED)]
    try:
        result = prune(case.path, out, **asked, jobs=1, threads=1)
        for failure in result.failures:
            must("please report" not in failure.message, failure.message)
            must(not result.outputs and not out.exists(), "something is left of a failure")
            raise CertkError(failure.message)
        [report] = result.outputs
        [found] = audit([Path(report.target)], [case.path]).outputs
        must(found.holds, f"findings: {list(map(str, found.findings))}")
        must(found.confirmed_rows == found.rows > 0, "not every row is confirmed")
        must(found.confirmed_lower_bounds == found.lower_bounds, "nor every lower bound")
        must("eps" not in asked or found.lower_bounds > 0, "no lower bound at all")
    except (CertkError, OSError):
        must(not out.exists(), "something is left of a refusal")
        raise
    finally:
        shutil.rmtree(out, ignore_errors=True)


Reader = Callable[[Case], Any]
READERS: dict[str, list[Reader]] = {
    "cache": [read_cache, read_nhd, inspect, verify_against, pruned],
    "output": [verify_output, inspect, pruned],
    "coded": [verify_output, inspect],
    "index": [read_cache, inspect, pruned],
    "bomb": [read_cache, pruned],
}
RARELY: list[Reader] = [command]
"""For every fiftieth file, since they take longer."""


def run(folder: Path, kind: str, seeds: range) -> Counter[str]:
    """Damage by each seed and read; how the readers ended, or an exception of theirs."""
    sound = folder / "sound" / kind
    content = {path.name: path.read_bytes() for path in sound.iterdir()}
    main_name = next((name for name in content if name.endswith(".json")), "x.safetensors")
    place = folder / f"damaged-{kind}-{seeds.start}"
    ended: Counter[str] = Counter()
    place.mkdir()
    for seed in seeds:
        for name, held in damage(content, seed).items():
            (place / name).write_bytes(held)
        judge(Case(place / main_name, sound / main_name), kind, seed, ended)
    return ended


def bombard(folder: Path, kind: str) -> Counter[str]:
    """The same with headers and indexes that grow when they are read."""
    sound = folder / "sound" / kind
    place = folder / f"bombs-{kind}"
    shutil.copytree(sound, place)
    path = next(iter(place.glob("*.json")), place / "x.safetensors")
    ended: Counter[str] = Counter()
    for number, bomb in enumerate(bombs()):
        path.write_bytes(bomb.encode() if path.suffix == ".json" else join(bomb, b""))
        judge(Case(path, sound / path.name), "bomb", number + 1, ended)
    return ended


def judge(case: Case, kind: str, seed: int, ended: Counter[str]) -> None:
    """Run all readers on one file."""
    for reader in READERS[kind] + (RARELY if seed % 50 == 0 else []):
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            reader(case)
            ended[f"{reader.__name__} read"] += 1
        except (CertkError, OSError) as error:
            said = str(error)
            must("\n" not in said and len(said) < 5000, f"seed {seed}: {said[:300]!r}")
            ended[f"{reader.__name__} refused"] += 1
        except BaseException as error:
            took = time.process_time() - started
            print(f"{kind}, seed {seed}, {reader.__name__}, after {took:.1f} s", file=sys.stderr)
            traceback.print_exception(error)
            raise SystemExit(1) from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory() -> None:
    """Allow this process so much more address space than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _too_slow(_number: int, _frame: object) -> None:
    raise TooSlowError(f"not done after {SECONDS} s")


if __name__ == "__main__":
    where, what, first, last = sys.argv[1:]
    signal.signal(signal.SIGPROF, _too_slow)
    limit_memory()
    found = run(Path(where), what, range(int(first), int(last)))
    if first == "0" and what not in ("output", "coded"):
        found += bombard(Path(where), what)
    print(json.dumps(found))
