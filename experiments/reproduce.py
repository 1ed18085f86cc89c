"""Run the experiments of the papers and write tables, figures and verdicts.

`python experiments/reproduce.py [NAME...]` writes for each experiment NAME.md, with verdicts and
tables, and NAME.png into `experiments/outcomes` (or `--out DIR`). Files of the same names are
replaced. The exit code is 1 where a verdict is not the one that docs/papers.md tells.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from papers import (
    bert_table,
    certified_attention,
    gap_rules,
    gaussian_rule,
    identity,
    key_search,
    output_error,
    page_bounds,
    power_windows,
    rounding,
    sampling,
    self_attention,
)
from papers.common import Experiment, Settings, Table, Verdict
from PIL import Image

import certk_rs

EXPERIMENTS: tuple[Experiment, ...] = (
    gaussian_rule, bert_table, identity, gap_rules, output_error, power_windows, self_attention,
    sampling, rounding, key_search, page_bounds, certified_attention,
)  # fmt: skip
HERE = Path(__file__).resolve().parent
PAPERS = HERE.parent / "docs" / "papers.md"
# Experiment, number of the verdict, verdict, outcome.
_ROW = re.compile(r"^\|.*\| \[([a-z-]+) (\d+)\]\(\S*\) \| (holds|fails): (.*) \|$", re.M)


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names, or all of them.

    Raises:
        SystemExit: A name is unknown.
    """
    known = {experiment.NAME: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no experiment {name!r}: there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(EXPERIMENTS)


def machine() -> str:
    """Return the processor and the versions, for the head of the outcomes."""
    about = Path("/proc/cpuinfo")
    cpu = platform.machine()
    if about.exists():
        models = [x for x in about.read_text().splitlines() if x.startswith("model name")]
        cpu = models[0].partition(": ")[2] if models else cpu
    return f"{cpu}; Python {platform.python_version()}; certk_rs {certk_rs.__version__}"


def page(
    experiment: Experiment, data: dict[str, Any], verdicts: Sequence[Verdict], run: str
) -> str:
    """Return the page of one experiment; `run` is a line about the machine and the seed."""
    name = experiment.NAME
    judged = Table(
        "Verdicts",
        ["claim", "outcome", "verdict"],
        [[v.claim, v.outcome, word(v)] for v in verdicts],
    )
    parts = [f"# {name}", experiment.ABOUT, judged.markdown(), f"![{name}]({name}.png)"]
    parts += [*(table.markdown() for table in experiment.tables(data)), run]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def word(verdict: Verdict) -> str:
    """Return a verdict in words."""
    return "holds" if verdict.holds else "fails"


def told(text: str) -> dict[tuple[str, int], tuple[str, str]]:
    """Return the verdict and the outcome of each row of docs/papers.md, by experiment and place."""
    return {(name, int(i)): (held, outcome) for name, i, held, outcome in _ROW.findall(text)}


def differences(text: str, judged: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Return a line for each verdict that a page tells otherwise."""
    rows = told(text)
    return [
        f"{name} {i}: the page says that it {rows[name, i][0]}, and it {word(verdict)}"
        for name, verdicts in judged.items()
        for i, verdict in enumerate(verdicts, 1)
        if (name, i) in rows and rows[name, i][0] != word(verdict)
    ]


def draw(figure: Any, path: Path) -> None:
    """Save a figure as a small PNG of few colours, and close it."""
    image = io.BytesIO()
    figure.savefig(image, dpi=80)
    plt.close(figure)
    Image.open(image).convert("RGB").quantize(32).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, judge, draw and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some experiments only")
    parser.add_argument("--out", type=Path, default=HERE / "outcomes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: numbers mean little")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="an encoder with its tokenizer, for bert-table")
    options = parser.parse_args(arguments)
    out, settings = options.out, Settings(options.quick, options.seed, options.model)
    experiments = chosen(options.names)
    out.mkdir(parents=True, exist_ok=True)
    about = f"{machine()}; seed {options.seed}."
    judged = {}
    for experiment in experiments:
        start = time.monotonic()
        # Data are plain: what JSON can hold.
        data = json.loads(json.dumps(experiment.run(settings)))
        judged[experiment.NAME] = verdicts = experiment.verdicts(data)
        (out / f"{experiment.NAME}.md").write_text(page(experiment, data, verdicts, about), "utf-8")
        draw(experiment.draw(data), out / f"{experiment.NAME}.png")
        print(f"{experiment.NAME}: {time.monotonic() - start:.1f} s")
        for verdict in verdicts:
            print(f"  {word(verdict)}: {verdict.claim}: {verdict.outcome}")
    # The page is about the sizes and the encoder of this repository.
    usual = not options.quick and options.model is None
    if usual and (other := differences(PAPERS.read_text("utf-8"), judged)):
        raise SystemExit("\n".join(["docs/papers.md tells other verdicts:", *other]))


if __name__ == "__main__":
    main()
