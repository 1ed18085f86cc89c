"""The pages of the Python interface: a module each, whose docstrings mkdocstrings then shows.

Sources are read, not imported, so that neither torch nor transformers is needed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from site_map import ROOT

PACKAGE = ROOT / "python" / "certk_rs"


@dataclass(frozen=True)
class Shown:
    """A module of the interface."""

    name: str
    title: str
    members: tuple[str, ...] = ()
    """Whole names to show, where they are not the public names of the module."""
    about: str = ""
    """Its description, where that is not its docstring."""


# In the order of the site.
MODULES = (
    Shown("certk_rs", "certk_rs"),
    Shown("certk_rs.bounds", "bounds"),
    Shown("certk_rs.gaussian", "gaussian"),
    Shown("certk_rs.windows", "windows"),
    Shown("certk_rs.montecarlo", "montecarlo"),
    Shown("certk_rs.torch", "torch"),
    Shown("certk_rs.transformers", "transformers"),
    Shown("certk_rs.kvpress", "kvpress"),
    Shown("certk_rs.lmcache", "lmcache"),
    Shown("certk_rs.vllm", "vllm"),
    Shown("certk_rs.guard", "guard", ("certk_rs.guard.Guard", "certk_rs.guard.Judged")),
    Shown(
        "certk_rs._jobs",
        "Results of jobs",
        (
            "certk_rs._jobs.results.JobResult",
            "certk_rs._jobs.results.Failure",
            "certk_rs._jobs.results.Skipped",
            "certk_rs._jobs.verify.Verdict",
            "certk_rs._jobs.gate.Gate",
            "certk_rs._jobs.analyze.Analysis",
        ),
        "What `prune`, `verify`, `gate` and `analyze` return.",
    ),
)
# Not pages of their own: what is public of them is shown under the package, or is no interface.
ELSEWHERE = {
    "__init__": "certk_rs",
    "__main__": "python -m certk_rs",
    "audit": "certk_rs.verify, of which it is the engine",
    "cli": "the page of commands",
    "comparison": "certk_rs.compare",
    "errors": "certk_rs.CertkError",
    "hot_keys": "certk prune --hot",
    "keepset": "certk_rs.keep_set",
    "kept_rows": "certk_rs.KeptRows",
    "key_index": "certk_rs.KeyIndex",
    "kv_index": "certk_rs.KvIndex",
    "output": "certk_rs.bounds.output_error",
    "paged_rows": "certk_rs.PagedRows",
    "ragged_rows": "certk_rs.RaggedRows",
    "results": "certk_rs",
    "selection": "certk_rs.select",
    "sparse_attention": "certk_rs.attention",
}


def pages() -> dict[str, str]:
    """Return the text of each page, by its place, the list of all modules first."""
    found = {"api/index.md": _index()}
    for module in MODULES:
        found[place(module)] = _page(module)
    return found


def place(module: Shown) -> str:
    """Return the place of a module's page."""
    return f"api/{module.name.rpartition('.')[2].lstrip('_')}.md"


def public_names(name: str) -> list[str]:
    """Return the public names of a module: `__all__`, or its definitions without underscore."""
    tree = _tree(name)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in tree.body if isinstance(node, defined)]
    return [each for each in names if not each.startswith("_")]


def _tree(name: str) -> ast.Module:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _modules_of(name: str) -> set[str]:
    return {each.name for each in MODULES} & {f"{name}.{x}" for x in public_names(name)}


def _index() -> str:
    lines = [
        "# Python API",
        "",
        "What each function takes, gives and raises, from the docstrings of the sources. The crate "
        'has <a href="../rust/certk_rs/index.html">pages of its own</a>, by rustdoc.',
        "",
        "| module | |",
        "|---|---|",
    ]
    for module in MODULES:
        about = _about(module).partition("\n\n")[0]
        said = " ".join(about.split()).replace("|", "\\|")
        lines.append(f"| [`{module.name}`]({place(module).removeprefix('api/')}) | {said} |")
    return "\n".join(lines) + "\n"


def _page(module: Shown) -> str:
    members = module.members or _members(module.name)
    shown = [f"::: {each}\n" for each in members]
    return "\n".join([f"# {module.title} {{ #{module.name} }}\n", f"{_about(module)}\n", *shown])


def _about(module: Shown) -> str:
    return module.about or ast.get_docstring(_tree(module.name)) or ""


def _members(name: str) -> list[str]:
    """Return the public names of a module, functions before classes, without modules."""
    found = {f"{name}.{each}" for each in public_names(name)} - _modules_of(name)
    return sorted(found, key=lambda each: (each.rpartition(".")[2][0].isupper(), each))
