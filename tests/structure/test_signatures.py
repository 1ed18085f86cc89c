"""An option has one name, one place in the order and one default, from Rust to torch.

Options of selections are declared once, in Rust; what is forgotten on the way outward is named
here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

import certk_rs as ck
from certk_rs import bounds, key_index, montecarlo, output
from certk_rs._cli.tree import tree
from repository import ROOT

ROWS = ["kind", "scale", "mask", "lengths", "indptr", "causal_offset"]


# Of one set for many rows alone.
OF_SETS = {"effort"}


def declared() -> dict[str, str]:
    """The options of a selection as Rust declares them, with their defaults."""
    source = (ROOT / "src" / "select" / "options.rs").read_text()
    found = re.findall(r"^    (\w+)\([^\n]*\): [^\n]* = ([^\n]*);$", source, re.M)
    assert len(found) >= 7
    return {name: default for name, default in found if name not in OF_SETS}


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_python_has_every_option_of_rust() -> None:
    python = {"None": None, "false": False, "0": 0, "1": 1}
    expected = {name: python[default] for name, default in declared().items()}
    options = keywords(ck.select)
    assert list(options) == [*ROWS, *expected]
    assert {name: options[name] for name in expected} == expected


def test_the_binding_has_every_option_of_rust() -> None:
    stub = ast.parse((ROOT / "python" / "certk_rs" / "_native.pyi").read_text())
    for function in stub.body:
        if isinstance(function, ast.FunctionDef) and function.name == "select":
            assert [argument.arg for argument in function.args.args] == ["rows", "eps", *declared()]
            return
    pytest.fail("the stub has no select")


def test_torch_has_every_option_of_python() -> None:
    pytest.importorskip("torch")
    operators = importlib.import_module("certk_rs.torch")
    for name in ("select", "select_mask"):
        assert keywords(getattr(operators, name)) == keywords(ck.select)
    rows_in_a_batch = {k: v for k, v in keywords(ck.keep_set).items() if k != "indptr"}
    assert keywords(operators.keep_set) == rows_in_a_batch


def test_the_command_has_every_option_of_rust() -> None:
    command = tree().commands["select"]
    assert {*declared()} - {"threads"} <= {parameter.name for parameter in command.params}


def test_schemas_of_torch_have_every_argument_of_python() -> None:
    """Every argument of Python is in the schema: an operator would drop a missing one."""
    pytest.importorskip("torch")
    operators = importlib.import_module("certk_rs.torch")
    # One argument of Python may be two of a schema, and queries, keys and values are positional.
    parts = {"eps_per_row", "max_fraction", "keep_indptr"}
    pages = {"block_table", "key_lengths", "layout"}
    names = ("selection", "select_mask", "certify", "keep_set", "attention", "attention_paged")
    for name in names:
        function = {"selection": "select", "attention_paged": "attention"}.get(name, name)
        asked = set(inspect.signature(getattr(operators, function)).parameters) - {"index"}
        # Attention has an operator of its own for pages.
        asked -= pages if name == "attention" else set()
        schema = getattr(torch_operators(), name).default._schema
        assert {argument.name for argument in schema.arguments} - parts == asked, name


def torch_operators() -> Any:
    return pytest.importorskip("torch").ops.certk


def test_attention_has_every_option_of_rust() -> None:
    source = (ROOT / "src" / "attention" / "options.rs").read_text()
    body = re.search(r"^pub struct AttentionOptions.*?\{\n(.*?)^\}", source, re.M | re.S)
    assert body
    options = set(re.findall(r"^    pub (\w+):", body[1], re.M))
    # The output has the precision of the queries, arrays say if they are mapped, and a `KvIndex`
    # has an index of the values.
    assert options - {"precision", "mapped", "value_index"} <= set(keywords(ck.attention))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("SearchOptions", ck.KeyIndex.search),
        ("RecallOptions", ck.KeyIndex.recall),
        ("RecallOptions", ck.KeyIndex.log_mass),
        ("IndexOptions", ck.KeyIndex.build),
    ],
)
def test_an_index_has_every_option_of_rust(name: str, function: Callable[..., Any]) -> None:
    source = (ROOT / "src" / "index" / "options.rs").read_text()
    body = re.search(rf"^pub struct {name}.*?\{{\n(.*?)^\}}", source, re.M | re.S)
    assert body
    options = re.findall(r"^    pub (\w+):", body[1], re.M)
    assert len(options) >= 2
    assert set(options) <= set(keywords(function))


def variants(file: str, name: str) -> list[str]:
    """The variants of a Rust enum, as Python names them."""
    source = (ROOT / "src" / file).read_text()
    body = re.search(rf"^pub enum {name} \{{\n(.*?)^\}}", source, re.M | re.S)
    assert body
    found = re.findall(r"^    ([A-Z]\w*)", body[1], re.M)
    return [re.sub(r"(?<!^)(?=[A-Z])", "_", variant).lower() for variant in found]


@pytest.mark.parametrize(
    ("file", "name", "python"),
    [
        ("index/options.rs", "Rule", get_args(key_index.Rule)),
        ("montecarlo/confidence.rs", "Method", get_args(montecarlo.Method)),
        ("bounds/smallest.rs", "GapRule", [r for r in get_args(bounds.Rule) if r != "exact"]),
    ],
)
def test_python_has_every_choice_of_rust(file: str, name: str, python: list[str]) -> None:
    assert sorted(variants(file, name)) == sorted(python)


@pytest.mark.parametrize(
    ("file", "name", "python"),
    [
        ("bounds/output.rs", "OutputBound", list(output._NAMES)),
        ("index/found.rs", "Rung", [rung.name.lower() for rung in ck.Rung]),
        ("certificate.rs", "Status", [status.name.lower() for status in ck.Status]),
    ],
)
def test_what_comes_as_a_number_is_numbered_alike(file: str, name: str, python: list[str]) -> None:
    assert variants(file, name) == python
