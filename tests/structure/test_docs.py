"""Pages: blocks run as shown, links lead somewhere, and figures are right.

Python blocks of a page run in their order, in one namespace and one empty folder, and so do `certk`
commands; what a page takes for given is in GIVEN.
Rust blocks run in `cargo test --doc`.
"""

from __future__ import annotations

import enum
import math
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import errors
from doc_pages import anchors, assert_printed, blocks, known, pages, run_page
from repository import EXAMPLE, ROOT

PAGES = pages()
# Pages that need what is not here, and where they are run: kvpress is in the other environment,
# a cluster in the process that has one.
ELSEWHERE = {
    "docs/kvpress.md": "tests/transformers/test_kvpress.py",
    "docs/cluster.md": "tests/files/test_ray.py",
}
LANGUAGES = {"bibtex", "python", "sh", "rust", "toml", "text", "json"}


def _cache() -> dict[str, Any]:
    shutil.copy(EXAMPLE, "cache.safetensors")
    return {}


def _caches() -> dict[str, Any]:
    for name in ("caches/one.safetensors", "caches/more/two.safetensors"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(EXAMPLE, name)
    return {}


def _readme() -> dict[str, Any]:
    _cache()
    return {"folder": _saved_model(), "inputs": {"input_ids": _zoo().tokens(1, 12)}}


def _gate() -> dict[str, Any]:
    return _cache() | _transformers()


def _transformers() -> dict[str, Any]:
    _saved_model()
    zoo = _zoo()
    # The caches below are those of this text, and generation goes on behind it.
    text, more = "a text " * 50, "and"
    Path("text.txt").write_text(text)
    ids = zoo.torch.tensor([[ord(c) - 30 for c in text + more]])
    return {"model": zoo.build("llama"), "inputs": {"input_ids": ids[:, :20]}, "ids": ids}


def _lmcache() -> dict[str, Any]:
    """A request of one layer, as LMCache's SDK has it, which changes nothing."""
    torch = pytest.importorskip("torch")
    kinds = enum.Enum("LMCacheSDKCacheKind", {"KV": "kv", "QUERY": "query"})
    kv, query = torch.randn(2, 1, 512, 8 * 128), torch.randn(1, 1, 512, 32 * 128)
    caches = {kinds["KV"]: kv, kinds["QUERY"]: query}

    def modify_kv(fn: Callable[..., Any]) -> None:
        left, tokens = fn(caches, list(range(512)))
        assert left.shape[2] == len(tokens)

    stream = types.SimpleNamespace(modify_kv=modify_kv)
    return {"stream": stream, "LMCacheSDKCacheKind": kinds}


def _vllm() -> dict[str, Any]:
    """An engine of vLLM whose worker certifies one layer."""
    from certk_rs import vllm

    def generate(prompts: list[str]) -> None:
        assert os.environ.pop(vllm._VARIABLE) == "0.01"
        result = ck.attention(*np.ones((3, 1, 2, 8)), 0.01)
        vllm.record("model.layers.0.self_attn.attn", np.array([0]), 2, result, 0.01)

    def collective_rpc(name: str) -> list[Any]:
        return [getattr(vllm.WorkerExtension(), name)()]

    engine = types.SimpleNamespace(generate=generate, collective_rpc=collective_rpc)
    return {"LLM": lambda model, **_: engine, "model": "model", "prompts": []}


def _import() -> dict[str, Any]:
    pytest.importorskip("torch")
    foreign = ROOT / "tests" / "files" / "foreign"
    shutil.copy(foreign / "mlx_kv.safetensors", "prompt.safetensors")
    shutil.copytree(foreign / "lmcache_disk", "chunks")
    names = sorted((file.name for file in Path("chunks").iterdir()), reverse=True)
    Path("order.txt").write_text("\n".join(names))
    return {}


# What a page takes for given: files in the folder it runs in, and names.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": _readme,
    "docs/python.md": _cache,
    "docs/report.md": _cache,
    "docs/start.md": _transformers,
    "docs/transformers.md": _transformers,
    "docs/howto/gate.md": _gate,
    "docs/howto/import.md": _import,
    "docs/howto/lmcache.md": _lmcache,
    "docs/howto/prune-directory.md": _caches,
    "docs/howto/quantised.md": _cache,
    "docs/howto/transformers.md": _transformers,
    "docs/howto/vllm.md": _vllm,
    "docs/files.md": _cache,
}


def _zoo() -> Any:
    return pytest.importorskip("model_zoo")


def _saved_model() -> str:
    """A tiny Llama and a tokenizer of single letters, in the folder `model`."""
    zoo = _zoo()
    zoo.build("llama").save_pretrained("model")
    # None is 0, which is padding.
    tokenizer = zoo.letters(2)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained("model")
    return "model"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = blocks((ROOT / page).read_text())
    assert {block.language for block in found} <= LANGUAGES
    if not found:
        return
    if "torch" in (ROOT / page).read_text():
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    try:
        run_page(page, GIVEN.get(page, dict)())
    finally:
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)


def test_every_page_that_is_run_elsewhere_is() -> None:
    for page, place in ELSEWHERE.items():
        assert f'run_page("{page}"' in (ROOT / place).read_text()
    assert ELSEWHERE.keys() | GIVEN.keys() <= set(PAGES)
    assert {"README.md", "CONTRIBUTING.md", "benches/README.md"} <= set(PAGES)


def test_the_reader_of_blocks() -> None:
    told = blocks("a\n```sh\nmake x\n```\n```python\n1\n2\n```\n")
    assert [(b.language, b.line, b.text) for b in told] == [
        ("sh", 3, "make x\n"),
        ("python", 6, "1\n2\n"),
    ]
    with pytest.raises(AssertionError, match="never closed"):
        blocks("```sh\n")
    assert blocks("```\nx\n```\n")[0].language not in LANGUAGES
    assert blocks("```c++\nx\n```\n")[0].language not in LANGUAGES


def test_what_a_page_shows_as_printed_is_compared() -> None:
    assert_printed("kept 5 of 8\n...\n ─── end .5\n", "kept 17 of 90\nmore\n ── end 1.25\n", "x")
    for other in ("lost 5 of 8", "kept 5 of 8 keys", "kept 5 of 8\nkept 5 of 8"):
        with pytest.raises(AssertionError, match="is not printed"):
            assert_printed(other, "kept 17 of 90\n", "x")


def test_rust_blocks_are_run_by_cargo() -> None:
    library = (ROOT / "src" / "lib.rs").read_text()
    rust = {
        page
        for page in PAGES
        if any(b.language == "rust" for b in blocks((ROOT / page).read_text()))
    }
    assert rust == set(re.findall(r'include_str!\("\.\./(.*)"\)', library))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_at_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", plain):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.read_text()), target
    # No code by indentation alone, which no test would run.
    assert not re.findall(r"^ {4,}(?:certk|python|make|pip|import|from) .*", plain, re.M)
    # The history names commands and scripts that are gone.
    for span in re.findall(r"`([^`\n]+)`", plain if page != "CHANGELOG.md" else ""):
        words = [word for word in span.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
            known(words[1], words[2:], page)
        if words[:1] == ["certk"] and len(words) > 1:
            check_command(words[1:], page)


def test_headings_have_the_anchors_of_the_places_where_they_are_read() -> None:
    text = "a: `--b`!\n===\n# A\n## a b\n```sh\n# no\n```\n## [x](y) -- `z_z`\n## A b\n"
    assert anchors(text) == {"a---b", "a", "a-b", "a-b-1", "x----z_z"}


def check_command(words: list[str], page: str) -> None:
    """See that the command line knows a command, and its options."""
    from certk_rs._cli.tree import tree

    command: Any = tree().commands.get(words[0])
    assert command is not None, f"{page}: certk {words[0]}"
    options = {name for parameter in command.params for name in parameter.opts}
    for word in words[1:]:
        assert not word.startswith("-") or word in options, f"{page}: certk {' '.join(words)}"


def test_the_map_names_the_folders_that_there_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {name.rstrip("/") for name in re.findall(r"`([\w./-]+)/`", page)}
    assert not [name for name in named if not (ROOT / name).is_dir()]
    rooms = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "crates", "python/certk_rs")
        for path in (ROOT / folder).iterdir()
        if path.is_dir() and path.name != "__pycache__" and any(path.rglob("*.*"))
    }
    assert rooms <= named
    files = {file.name for folder in ("src", "python") for file in (ROOT / folder).rglob("*.*")}
    assert set(re.findall(r"`(\w+\.(?:rs|py))`", page)) <= files


def test_the_list_for_language_models_has_every_page_for_users() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert not [name for name in listed if not (ROOT / name).is_file()]
    others = {"architecture", "experiments", "install", "package"}
    pages_ = {f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")}
    assert pages_ - {f"docs/{name}.md" for name in others} <= set(listed)


def test_the_page_of_a_package_has_no_links_that_lead_nowhere() -> None:
    for manifest in ("pyproject.toml", "Cargo.toml"):
        readme = re.search(r'^readme = "(.*)"$', (ROOT / manifest).read_text(), re.M)
        assert readme is not None
        text = (ROOT / readme[1]).read_text()
        assert not re.findall(r"!?\[[^\]]*\]\((?!https://)", text)


# ------------------------------------------------------------------------------------ figures


def manifest(name: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text(), re.M)
    assert found is not None
    return found[1]


def says(page: str, pattern: str) -> list[str]:
    """The groups of what a page says somewhere, line breaks aside."""
    found = re.search(pattern, " ".join((ROOT / page).read_text().split()))
    assert found is not None, f"{page} no longer says {pattern!r}"
    return list(found.groups())


def test_versions_that_pages_name_are_those_of_the_manifests() -> None:
    python = manifest("pyproject.toml", r'^requires-python = ">=(.*)"$')
    rust = manifest("Cargo.toml", r'^rust-version = "(.*)"$')
    assert says("README.md", r"Python >= ([\d.]+), Rust >= ([\d.]+) and") == [python, rust]
    assert says("CONTRIBUTING.md", r"Have Python >= ([\d.]+),") == [python]
    version = manifest("Cargo.toml", r'^version = "(.*)"$')
    assert manifest("CITATION.cff", r"^version: (.*)$") == version
    kvpress = manifest("tests/transformers/older-requirements.txt", r"^kvpress==(.*)$")
    older = manifest("tests/transformers/older-requirements.txt", r"^transformers==(.*)$")
    assert says("docs/kvpress.md", r"kvpress ([\d.]+) needs .*?tried with ([\d.]+) ") == [
        kvpress,
        older,
    ]


def test_hints_name_the_packages_of_the_extras() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for extra, packages in errors._EXTRAS.items():
        assert list(packages) == re.findall(
            r'"(.*?)"', manifest("pyproject.toml", rf"^{extra} = (.*)$")
        )
        assert errors.pip_install(extra).startswith("pip install '")
    # Of a package that no index has: neither in pages nor in messages.
    files = [ROOT / page for page in PAGES] + sorted((ROOT / "python").rglob("*.py"))
    for file in files:
        if file.name not in ("errors.py", "CHANGELOG.md"):
            assert "install 'certk-rs" not in file.read_text(), file
    for page in PAGES:
        for extra in re.findall(r"pip install '\.\[(\w+)\]'", (ROOT / page).read_text()):
            assert re.search(rf"^{extra} = \[", text, re.M), f"{page}: {extra}"


def test_the_readme_says_what_its_figure_shows() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(EXAMPLE)
    layers = sorted({name.split(".")[1] for name in tensors})
    scores = np.concatenate(
        [
            tensors[f"layers.{i}.query"][0].astype(float)
            @ tensors[f"layers.{i}.key"][0].astype(float).transpose(0, 2, 1)
            / np.sqrt(tensors[f"layers.{i}.query"].shape[-1])
            for i in layers
        ]
    )
    rows, apart = says(
        "README.md", r"each of (\d+) real attention rows .* they are ([\d.]+) % apart"
    )
    assert int(rows) == scores.shape[0] * scores.shape[1]
    sets = [ck.keep_set(each, 0.1) for each in scores]
    bound = sum(each.lower_bound for each in sets)
    assert f"{100 * (sum(each.k for each in sets) - bound) / bound:.1f}" == apart


def test_the_concepts_say_what_their_figures_show() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(EXAMPLE)
    query, key = (tensors[f"layers.2.{role}"][0].astype(float) for role in ("query", "key"))
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
    _, m, n = scores.shape
    kept, keys = says("docs/concepts.md", r"; (\d+) of (\d+) keys leave less than 5 %")
    assert [int(kept), int(keys)] == [ck.select(scores[0, 0], 0.05).k, n]
    assert says("docs/concepts.md", r"each of (\d+) rows loses") == says(
        "docs/concepts.md", r"for 1 to (\d+) rows"
    )
    sets = [ck.keep_set(rows[: m // 2], 0.05).to_mask() for rows in scores]
    later = [
        ck.certify(rows[m // 2 :], kept).tail_mass_upper
        for rows, kept in zip(scores, sets, strict=True)
    ]
    assert says("docs/concepts.md", r"later ones, up to ([.\d]+)\.") == [
        f"{np.max(later):.2f}".lstrip("0")
    ]


def test_gaussian_scores_keep_what_the_benchmarks_say() -> None:
    rng = np.random.default_rng(0)
    told = says(
        "benches/README.md", r"keep about (\d+) %, (\d+) % and (\d+) % of the keys at eps = 0.01"
    )
    for sigma, percent in zip((1, 3, 5), told, strict=True):
        kept = ck.select(sigma * rng.standard_normal((32, 8192), dtype=np.float32), 0.01)
        assert abs(100 * kept.k.mean() / 8192 - int(percent)) < 1


def test_an_index_takes_what_the_page_says() -> None:
    assert says("docs/search.md", r"Memory: (d \+ 4) bytes per key") == ["d + 4"]
    for d, rounded in ((64, 64), (126, 128)):
        keys = np.random.default_rng(0).standard_normal((5000, d), dtype=np.float32)
        size = ck.KeyIndex.build(keys, keep_keys=False).nbytes
        matrix = 4 * rounded * (rounded + 16)
        assert 5000 * (rounded + 4) <= size - matrix <= 5000 * (rounded + 4) + 12288


def test_the_decoder_of_the_example_is_as_large_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "experiments")
    from decoder_training import Recipe

    recipe = Recipe()
    layers, heads, kv_heads, millions = says(
        "docs/experiments.md",
        r"\((\d+) layers, (\d+) query and (\d+) key heads, ([\d.]+) million weights\)",
    )
    assert [recipe.layers, recipe.heads, recipe.kv_heads] == [
        int(layers),
        int(heads),
        int(kv_heads),
    ]
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=256, hidden_size=recipe.width, intermediate_size=5 * recipe.width // 2,
                num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads,
                num_key_value_heads=recipe.kv_heads, tie_word_embeddings=True,
            )
        )  # fmt: skip
    weights = sum(each.numel() for each in model.parameters())
    assert f"{weights / 1e6:.1f}" == millions


def test_the_certificate_by_hand_is_right() -> None:
    """Weights and masses by math.exp; the library sees the scores alone."""
    given, eps, total, masses, two, three, kept = says(
        "docs/concepts.md",
        r"Six scores are (.*?) and eps is ([.\d]+)\. .* add up to ([\d.]+), so the masses are "
        r"(.*?)\. The best two keys leave ([.\d]+), the best three ([.\d]+): keys (.*) stay",
    )
    scores = [float(each) for each in given.split(",")]
    weights = [math.exp(each) for each in scores]
    assert f"{sum(weights):.2f}" == total
    shares = [each / sum(weights) for each in weights]
    assert [float(each) for each in masses.split(",")] == [round(each, 4) for each in shares]
    assert [float(two), float(three)] == [round(math.fsum(shares[k:]), 4) for k in (2, 3)]
    assert float(three) <= float(eps) < float(two)
    assert kept == "0, 1 and 2"
    tail = math.fsum(shares[3:])
    low, high, mass, kl, again = says(
        "docs/concepts.md",
        r"interval ([.\d]+) to ([.\d]+)\. KL\(.*?ln\(1 - ([.\d]+)\) is ([.\d]+), and 1 - "
        r"e\^-([.\d]+)",
    )
    assert float(low) < tail < float(high)
    found = ck.select(np.array(scores, np.float32), float(eps))
    assert found.row(()).tolist() == [0, 1, 2]
    assert f"{found.tail_mass_lower:.6f}".lstrip("0") == low
    assert f"{found.tail_mass_upper:.6f}".lstrip("0") == high
    assert float(mass) == round(tail, 4)
    assert float(kl) == float(again) == round(-math.log(1 - tail), 4)
    assert 1 - math.exp(math.log(1 - tail)) == pytest.approx(tail)


def test_the_comparison_says_what_the_outcome_of_page_bounds_says() -> None:
    stored = (ROOT / "experiments" / "outcomes" / "page-bounds.md").read_text()
    rows = re.findall(
        r"^\| (\d) \| ([\d.]+) \| (.*?) \| [\d.]+ \| ([\d.]+) .* ([\d.]+) \|$", stored, re.M
    )
    at = {(int(w), float(s), m[:4]): (float(lost), float(b)) for w, s, m, lost, b in rows}
    told = says(
        "docs/comparison.md",
        r"lose ([.\d]+) of the mass and our codes ([.\d]+); in half precision ([.\d]+) and "
        r"([.\d]+)\. .* hold, lose ([.\d]+)\. .* at most ([.\d]+), codes of ([.\d]+)\.",
    )
    lost = [at[w, 0.5, m][0] for w in (4, 2) for m in ("page", "code")] + [at[4, 0.5, "best"][0]]
    bounds = [at[4, 0.5, m][1] for m in ("page", "code")]
    assert [float(each) for each in told] == [round(each, 3) for each in [*lost, *bounds]]
