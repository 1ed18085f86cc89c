"""Arrows between Rust files: items that each names, re-exports followed; tests are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

Module = tuple[str, ...]

NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(\#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^']+|[^\\'])'""", re.DOTALL
)
_USE = re.compile(r"^\s*(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", re.M)
# A block of methods that belong to a type alone, and one that a trait asks for.
_IMPL = re.compile(r"^impl\b(?P<head>[^{]*)\{\n(?P<body>.*?)^\}", re.M | re.S)
_METHOD = re.compile(r"^    (?:pub(?:\([^)]*\))? )?(?:const )?(?:unsafe )?fn (\w+)", re.M)
_PATH = re.compile(r"\b(?:crate|self|super|[a-z_]\w*)(?:::\w+)+")


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def code_of(text: str) -> str:
    """Rust source without comments, strings and `#[cfg(test)]` items; lines stay where they are."""
    text = NOT_CODE.sub(blank, text)
    for start in [m.start() for m in re.finditer(r"#\[cfg\(test\)\]", text)]:
        end, depth = start, 0
        while end < len(text) and not (depth == 0 and text[end] in ";}" and end > start):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
            if text[end - 1] == "}" and depth == 0:
                break
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def without_generics(text: str) -> str:
    """Return a type without what stands in angle brackets."""
    depth, kept = 0, []
    for before, character in zip(" " + text, text, strict=False):
        depth += character == "<"
        if not depth:
            kept.append(character)
        depth -= character == ">" and before != "-"
    return "".join(kept)


def used(tree: str) -> Iterator[tuple[str, str]]:
    """Every path of a use tree `a::{b, c::{d, e as f}}`, with the name that it gets."""
    tree = tree.strip()
    if not tree.endswith("}"):
        path, _, name = tree.partition(" as ")
        yield path.strip(), name.strip() or path.split("::")[-1].strip()
        return
    prefix, _, inner = tree[:-1].partition("{")
    depth, start = 0, 0
    for at, character in enumerate(inner + ","):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            if branch := inner[start:at].strip():
                for path, name in used(branch):
                    whole = prefix.removesuffix("::") if path == "self" else prefix + path
                    yield whole, whole.split("::")[-1] if name == "self" else name
            start = at + 1


class Crate:
    """The files of a crate as modules, and what each names."""

    def __init__(self, root: Path) -> None:
        self.files = {self._module(root, file): file for file in sorted(root.rglob("*.rs"))}
        self.code = {module: code_of(file.read_text()) for module, file in self.files.items()}
        self.uses = {
            module: [
                (path.replace(" ", ""), name, bool(use[1]))
                for use in _USE.finditer(code)
                for path, name in used(re.sub(r"\s+", " ", use[2]))
            ]
            for module, code in self.code.items()
        }

    @staticmethod
    def _module(root: Path, file: Path) -> Module:
        parts = file.relative_to(root).with_suffix("").parts
        return parts[:-1] if parts[-1] in ("mod", "lib") else parts

    def _absolute(self, module: Module, path: str) -> Module | None:
        first, *rest = path.split("::")
        if first == "crate":
            return tuple(rest)
        if first == "self":
            return (*module, *rest)
        if first == "super":
            above = rest if rest[:1] == ["super"] else ["self", *rest]
            return self._absolute(module[:-1], "::".join(above))
        if (*module, first) in self.files:
            return (*module, first, *rest)
        for path_of_name, name, _ in self.uses[module]:
            if name == first and path_of_name != first:
                found = self._absolute(module, path_of_name)
                return None if found is None else (*found, *rest)
        return None

    def _home(self, path: Module, depth: int = 0) -> Module | None:
        """The file that defines what an absolute path names."""
        here: Module = ()
        while path and (*here, path[0]) in self.files:
            here, path = (*here, path[0]), path[1:]
        if not path or depth > 20:
            return here
        for target, name, _ in self.uses[here]:
            if name == path[0]:
                absolute = self._absolute(here, target)
                if absolute is not None and absolute != (*here, name):
                    return self._home((*absolute, *path[1:]), depth + 1)
        return here

    def _impls(self, module: Module) -> Iterator[tuple[str, bool, str]]:
        """Yield of each impl block its type, true if it is one of a trait, and its body."""
        for block in _IMPL.finditer(self.code[module]):
            head = without_generics(block["head"]).split(" where ")[0]
            subject = head.split(" for ")[-1]
            if name := re.match(r"\s*&?(?:'\w+ )?(?:mut )?(?:\w+::)*(\w+)", subject):
                yield name[1], " for " in head, block["body"]

    def hidden(self) -> dict[Module, set[Module]]:
        """Of each file the others whose inherent methods it calls: no `use` names those.

        Calls that count are those on `self` in a block of the type, and on arguments of the type.
        """
        homes: dict[str, dict[str, set[Module]]] = {}
        for module in self.files:
            for name, of_trait, body in self._impls(module):
                for method in () if of_trait else _METHOD.findall(body):
                    homes.setdefault(name, {}).setdefault(method, set()).add(module)
        types = "|".join(homes)
        argument = re.compile(rf"\b(\w+): &?(?:'\w+ )?(?:mut )?({types})\b")
        graph: dict[Module, set[Module]] = {}
        for module, code in self.code.items():
            calls = {
                (name, method)
                for name, _, body in self._impls(module)
                for method in re.findall(r"\bself\s*\.(\w+)(?:::<[^(]*>)?\(", body)
            }
            for variable, name in set(argument.findall(code)):
                called = re.findall(rf"\b{variable}\s*\.(\w+)(?:::<[^(]*>)?\(", code)
                calls |= {(name, method) for method in called}
            found = [homes.get(name, {}).get(method, set()) for name, method in calls]
            graph[module] = {home for one in found if len(one) == 1 for home in one} - {module}
        return graph

    def dependencies(self) -> dict[Module, set[Module]]:
        """Of each file the others that it needs. What a room only hands on, it does not need."""
        graph: dict[Module, set[Module]] = {}
        for module, code in self.code.items():
            hands_on = self.files[module].name in ("mod.rs", "lib.rs")
            paths = [p for p, _, public in self.uses[module] if not (public and hands_on)]
            paths += _PATH.findall(_USE.sub("", code))
            absolute = [self._absolute(module, path) for path in paths]
            homes = {self._home(path) for path in absolute if path is not None}
            graph[module] = {home for home in homes if home and home != module}
        return graph
