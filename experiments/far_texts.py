"""Texts whose later bytes depend on far earlier ones: to train a small decoder by, and to test it.

Prose is what every machine with Python and this repository has: its documents and sources, and
those of Python's library. Between pieces of it stand tasks, made from a seed. They are written in
the 128 bytes beyond ASCII, which the prose is rid of:

- pairs: keys with their values, something else, and the keys again in another order, whose values
  must be known;
- copies: different symbols in a row, something else, and the row again;
- brackets: of four kinds, around words and each other; which kind closes must be known.

Each text comes with the places whose bytes follow from what stands far before.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
OURS = ("*.md", "docs/*.md", "src/**/*.rs", "python/**/*.py")
# One file in so many is never trained on.
HELD_OUT = 10
KEYS, VALUES = np.arange(128, 192, dtype=np.uint8), np.arange(192, 256, dtype=np.uint8)
SYMBOLS = np.concatenate([KEYS, VALUES])
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)
OPEN, CLOSE = b"([{<", b")]}>"
DEEPEST = 6
TASKS = ("pairs", "copies", "brackets")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """Bytes, which of them can be foretold at all, and which from far before."""

    bytes: Bytes
    told: NDArray[np.bool_]
    far: NDArray[np.bool_]

    def cut(self, length: int) -> Text:
        """Return its first bytes."""
        return Text(self.bytes[:length], self.told[:length], self.far[:length])


def prose(path: Path) -> bytes:
    """Return a file's text without all that is not ASCII."""
    return bytes(byte for byte in path.read_bytes() if byte < 128)


def files() -> tuple[list[Path], list[Path]]:
    """Files to train on, and those held out: chosen by their names, so for good."""
    library = Path(sysconfig.get_path("stdlib"))
    found = {path: str(path.relative_to(ROOT)) for glob in OURS for path in ROOT.glob(glob)}
    found |= {path: path.name for path in library.glob("*.py")}
    paths = sorted(found, key=found.__getitem__)
    held = [path for path in paths if zlib.crc32(found[path].encode()) % HELD_OUT == 0]
    return [path for path in paths if path not in held], held


def joined(*parts: Text) -> Text:
    """One behind the other."""
    return Text(
        np.concatenate([part.bytes for part in parts]),
        np.concatenate([part.told for part in parts]),
        np.concatenate([part.far for part in parts]),
    )


def _plain(text: Bytes, told: bool) -> Text:
    return Text(text, np.full(len(text), told), np.zeros(len(text), bool))


class Maker:
    """Makes texts from a corpus and a seed."""

    def __init__(self, corpus: bytes, seed: int) -> None:
        self.corpus = np.frombuffer(corpus, np.uint8)
        self.rng = np.random.default_rng(seed)

    def prose(self, length: int) -> Text:
        """Draw a piece of the corpus."""
        start = int(self.rng.integers(len(self.corpus) - length))
        return _plain(self.corpus[start : start + length], True)

    def pairs(self, count: int, gap: int, asked: int) -> tuple[Text, Text]:
        """Pairs and so much prose, and so many questions."""
        keys = self.rng.choice(KEYS, count, replace=False)
        values = self.rng.choice(VALUES, count)
        lines = np.stack([keys, values], axis=1)
        order = np.concatenate([self.rng.permutation(count) for _ in range(-(-asked // count))])
        answers = np.tile([False, True], asked)
        questions = Text(lines[order[:asked]].ravel(), answers, answers)
        return joined(_plain(lines.ravel(), False), self.prose(gap)), questions

    def copies(self, count: int, gap: int) -> tuple[Text, Text]:
        """Return a row of different symbols, so much prose, and the row again."""
        row = self.rng.choice(SYMBOLS, count, replace=False)
        # Which symbol begins the second row nothing says.
        again = np.arange(count) > 0
        return joined(_plain(row, False), self.prose(gap)), Text(row, again, again)

    def repeats(self, length: int) -> Text:
        """Repeat a row of different symbols."""
        count = int(self.rng.integers(8, 33))
        row = self.rng.choice(SYMBOLS, count, replace=False)
        again = np.arange(length) >= count
        return Text(np.resize(row, length), again, again)

    def brackets(self, length: int) -> Text:
        """Brackets open and close at random around letters, up to `DEEPEST` at a time."""
        text, told, stack = bytearray(), [], []
        while len(text) < length:
            if stack and (len(stack) == DEEPEST or self.rng.random() < 0.5):
                text.append(CLOSE[stack.pop()])
                told.append(True)
            else:
                stack.append(int(self.rng.integers(4)))
                text.append(OPEN[stack[-1]])
                told.append(False)
            word = self.rng.choice(LETTERS, int(self.rng.integers(0, 8)))
            text += word.tobytes()
            told += [False] * len(word)
        marks = np.array(told)
        return Text(np.frombuffer(bytes(text), np.uint8), marks, marks).cut(length)

    def row(self, length: int) -> Text:
        """Tasks and prose in turn, as much as it takes to fill a row."""
        parts: list[Text] = []
        left = length
        while left > 0:
            parts += self.some(left)
            left = length - sum(len(part.bytes) for part in parts)
        return joined(*parts).cut(length)

    def some(self, left: int) -> Iterator[Text]:
        """Return a task or prose, with a gap that may take all that is left."""
        kind = self.rng.choice(4, p=(0.4, 0.3, 0.1, 0.2))
        # Of all sizes: many short ones, from which the way is learned, and few long ones.
        gap = int(left * self.rng.random() ** 2)
        count = int(self.rng.integers(4, 33))
        if kind == 0:
            yield from self.pairs(count, gap, count)
        elif kind == 1:
            yield from self.copies(2 * count, gap)
        elif kind == 2:
            yield self.brackets(max(16, gap))
        else:
            yield self.prose(max(16, gap))
