"""The command line. Typer only parses: every command hands back a job, which `main` then runs.

So whatever goes wrong ends in one place: one line on stderr and an exit code, never a traceback.
0 done; 1 a certificate or a file does not hold; 2 bad input, usage or I/O error; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from ._display.page import pyplot
from ._files.atomic import write_text
from ._files.npy import read_array
from ._plan_command import plan as plan_command
from ._terminal import (
    audit_json,
    complain,
    print_json,
    progress_bar,
    round_up,
    say,
    show_analysis,
    show_audit,
    show_layers,
    warn,
)
from .audit import Audit, audit
from .cache_format import Options
from .errors import CertkError
from .jobs.analyze import analysis_json
from .jobs.analyze import analyze as analyze_caches
from .jobs.analyze_page import analysis_page
from .jobs.plan import expand, make_plan
from .jobs.report import report_json
from .jobs.run import run
from .results import Selection, Status
from .selection import select as select_rows

Job = Callable[[], int]

_EXAMPLE = Path("examples") / "data" / "minilm_small.safetensors"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Granularity(str, Enum):
    """One keep-set per kv head, or one per layer."""

    head = "head"
    layer = "layer"


class Kind(str, Enum):
    """What scores are."""

    logits = "logits"
    logprobs = "logprobs"
    probs = "probs"


Eps = Annotated[float, typer.Option("--eps", help="Tail mass that a row may lose, 0 <= eps < 1.")]
MaxKeep = Annotated[
    str | None,
    typer.Option(metavar="N|F", help="At most N keys (an integer) or a fraction F in (0, 1]."),
]
KeepFirst = Annotated[int, typer.Option(min=0, metavar="N", help="Always keep the first N keys.")]
KeepLast = Annotated[int, typer.Option(min=0, metavar="N", help="Always keep the last N keys.")]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: all there are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Names = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Names of the tensors: {i} for the layer, {key|value|query} with the three words "
        "in use, as in 'model.{i}.attn.{key|value|query}'.",
    ),
]
OneSetPer = Annotated[Granularity, typer.Option(help="One keep-set per kv head, or per layer.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _fail("interrupted", 130)
    except CertkError as error:
        code = _fail(f"error: {error}", 2)
    except BrokenPipeError:
        code = 2  # whoever read our output has gone
    except OSError as error:
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        code = _fail(f"error: {place}{error.strerror or error}", 2)
    except MemoryError:
        code = _fail("error: not enough memory: give fewer queries or keys in one file", 2)
    except Exception as error:
        # Others' messages may be of several lines.
        if hasattr(error, "format_message"):  # usage; its class has moved between versions of typer
            code = _fail(f"error: {_joined(error.format_message())} (see certk --help)", 2)
        else:
            what = f"unexpected {type(error).__name__}: {_joined(str(error))}"
            code = _fail(f"error: {what}; please report it", 2)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        code = _fail("error: unexpected panic, told above; please report it", 2)
    _give_up_stdout_if_broken()
    return code


def _give_up_stdout_if_broken() -> None:
    # Or the interpreter, which flushes once more at its end, would complain in its own words.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        job = command.main(args, prog_name="certk", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    # A number is what --help, --version and an interruption while parsing give.
    return job if isinstance(job, int) else job()


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        complain(message)
    return code


def _joined(message: str) -> str:
    return " ".join(message.split())


def _terminated(_number: int, _frame: object) -> None:
    # Unwinds, so that temporary files are removed.
    raise SystemExit(128 + signal.SIGTERM)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"certk {__version__}")
        raise typer.Exit


@app.callback()
def certk(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Certified selection of attention keys: what is dropped provably weighs no more than eps."""


@app.command()
def select(
    scores: Annotated[Path, typer.Argument(metavar="SCORES", help="A .npy or .npz file (..., n).")],
    eps: Eps,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the selection (.npz).")
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which array of an .npz with several.")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="What the scores are.")] = Kind.logits,
    scale: Annotated[float, typer.Option(help="Multiplies the scores.")] = 1.0,
    mask: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Boolean or additive mask (.npy).")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Valid prefix of each row (.npy).")
    ] = None,
    indptr: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Row starts of ragged flat scores (.npy).")
    ] = None,
    causal_offset: Annotated[
        int | None, typer.Option(metavar="N", help="Row i sees the keys <= i + N.")
    ] = None,
    min_keep: Annotated[int, typer.Option(metavar="N", help="Keep at least N keys.")] = 1,
    max_keep: MaxKeep = None,
    keep_first: KeepFirst = 0,
    keep_last: KeepLast = 0,
    block_size: Annotated[int, typer.Option(metavar="N", help="Keep whole blocks of N keys.")] = 1,
    prove_minimal: Annotated[
        bool, typer.Option("--prove-minimal", help="Decide open rows again in float64.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Select the fewest keys of every row of scores.

    What is dropped of a row is proven to weigh at most eps of its softmax mass.
    """

    def job() -> int:
        if out is not None:
            _check_new(out)
        selection = select_rows(
            read_array(scores, array),
            eps,
            kind=kind.value,
            scale=scale,
            mask=None if mask is None else read_array(mask),
            lengths=None if lengths is None else read_array(lengths),
            indptr=None if indptr is None else read_array(indptr),
            causal_offset=causal_offset,
            min_keep=min_keep,
            max_keep=_max_keep(max_keep),
            keep_first=keep_first,
            keep_last=keep_last,
            block_size=block_size,
            prove_minimal=prove_minimal,
            threads=threads,
        )
        if out is not None:
            selection._write(out, replace=False)
        over = int((selection.status == Status.OVER_BUDGET).sum())
        if over:
            warn(f"{over} of {selection.k.size} rows are over eps because of --max-keep")
        if as_json:
            print_json(_selection_json(selection, scores, eps, out))
        else:
            for line in selection.summary().splitlines():
                say(line)
            if out is not None:
                say(f"written to {out}")
        return 0

    return job


@app.command()
def prune(
    caches: Annotated[
        list[Path], typer.Argument(metavar="CACHE...", help="Cache files, or directories of them.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Output directory.")],
    eps: Eps,
    granularity: OneSetPer = Granularity.head,
    max_keep: MaxKeep = None,
    keep_first: KeepFirst = 0,
    keep_last: KeepLast = 0,
    names: Names = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Prune saved KV caches, with certificates.

    Every query in a file loses at most eps of its attention mass, and the output says how much: the
    certificate is in the same file. One keep-set serves all queries of a kv head (or of a layer).
    """

    def job() -> int:
        options = Options(granularity.value, _max_keep(max_keep), keep_first, keep_last)
        with progress_bar(quiet) as progress:
            plan = make_plan(caches, out, eps, options, names, progress)
            for warning in (text for task in plan.tasks for text in task.warnings):
                warn(warning)
            results = run(plan, progress, threads)
        outputs = [report_json(result) for result in results]
        for output in outputs:
            if over := output["rows_over_budget"]:
                warn(
                    f"{output['output']}: {over} of {output['rows']} rows are over eps because of "
                    f"--max-keep, the worst loses {round_up(output['worst_tail_mass'])}"
                )
        if as_json:
            print_json({"command": "prune", "eps": eps, "outputs": outputs})
            return 0
        for output in outputs:
            kept, total = output["kept"], output["total"]
            say(
                f"{output['output']}: kept {kept} of {total} keys ({100 * kept / total:.1f} %; at "
                f"least {output['lower_bound']} are needed), worst tail mass "
                f"{round_up(output['worst_tail_mass'])} of {output['rows']} rows"
            )
        return 0

    return job


@app.command()
def verify(
    outputs: Annotated[
        list[Path], typer.Argument(metavar="OUT...", help="Outputs, or directories of them.")
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="CACHE", help="An input, or a directory of them; may be repeated."),
    ] = None,
    names: Names = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Check what prune has written.

    Without inputs: that every byte is what the certificate says. With --against, also that what the
    certificate says is true: everything is recomputed. Exit code 1 if anything does not hold. An
    output that was pruned with --names needs the same here, if its spelling is not a known one.
    """

    def job() -> int:
        files = _distinct(path for output in outputs for path in expand(output))
        inputs = _distinct(path for cache in against or [] for path in expand(cache))
        if not files and not inputs:
            raise CertkError("there is no .safetensors file to verify: give outputs of certk prune")
        if against and not inputs:
            raise CertkError("--against names no .safetensors file: give the inputs of the outputs")
        with progress_bar(quiet) as progress:
            report = audit(files, inputs, progress, names)
        if as_json:
            print_json({"command": "verify", **audit_json(report)})
        else:
            show_audit(report)
        return _verdict(report)

    return job


@app.command()
def capture(
    model: Annotated[
        Path,
        typer.Option(
            "--model", metavar="DIR", help="A saved model of transformers, with tokenizer."
        ),
    ],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help="A text file in UTF-8, one sequence.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="CACHE", help="The cache file.")],
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Cut the text after N tokens.")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Write the last N queries only.")
    ] = None,
    as_json: AsJson = False,
) -> Job:
    """Run a local model over a text, and write the queries, keys and values of its attention.

    Each layer is written as it runs. Nothing is downloaded. Needs torch and transformers.
    """

    def job() -> int:
        _check_new(out)
        try:
            written = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CertkError(f"{text} is not text in UTF-8 ({error.reason}): convert it") from None
        try:
            from .transformers import capture_text
        except ImportError as error:
            raise CertkError(f"certk capture cannot run: {error}") from None
        found = capture_text(model, written, out, max_tokens=max_tokens, queries=queries)
        if as_json:
            print_json({"command": "capture", "output": str(out), **found})
        else:
            layers = len(found["layers"])
            say(f"{out}: {layers} layers of {found['tokens']} tokens, {found['dtype']}")
        return 0

    return job


@app.command()
def analyze(
    caches: Annotated[
        list[Path], typer.Argument(metavar="CACHE...", help="Cache files, or directories of them.")
    ],
    eps: Annotated[
        list[float] | None,
        typer.Option(help="A budget; may be repeated (the middle one is the main one)."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained page with plots.")
    ] = None,
    names: Names = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Tell how many keys each head of a cache needs, and whether pruning it is worth it."""

    def job() -> int:
        if html is not None:
            _check_new(html)
            pyplot()
        with progress_bar(quiet) as progress:
            found = analyze_caches(caches, eps or [0.1, 0.01, 0.001], names, progress, threads)
        if html is not None:
            write_text(html, analysis_page(found))
        if as_json:
            print_json({"command": "analyze", "caches": [analysis_json(cache) for cache in found]})
        else:
            show_analysis(found)
            if html is not None:
                say(f"written to {html}")
        return 0

    return job


@app.command()
def reproduce(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Where the page and tables go.")
    ],
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Some experiments only.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cache file; default: the example.")
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Small sizes: minutes become seconds.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Run the experiments of the papers: a JSON table and a plot each, and one HTML page."""

    def job() -> int:
        # The one command with so much behind it that the others should not have to load it.
        from .reproduce import Settings, run_experiments

        pyplot()
        settings = Settings(_example() if data is None else data, brief, seed)
        with progress_bar(quiet) as progress:
            done = run_experiments(out, experiments or [], settings, progress, warn)
        if as_json:
            print_json({"command": "reproduce", "out": str(out), "experiments": done})
        else:
            for entry in done:
                say(f"{entry['name']}: {entry['seen']}")
            say(f"written to {out / 'index.html'}")
        return 0

    return job


@app.command()
def demo(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cache file; default: the example.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Keep the output here; default: remove it."
        ),
    ] = None,
    eps: Annotated[float, typer.Option(help="Tail mass that a row may lose, 0 <= eps < 1.")] = 0.05,
    granularity: OneSetPer = Granularity.head,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Prune a small real cache, verify it, and show each layer."""

    def job() -> int:
        cache = _example() if data is None else data
        with contextlib.ExitStack() as stack:
            folder = out
            if folder is None:
                temporary = tempfile.TemporaryDirectory(prefix="certk-demo-")
                folder = Path(stack.enter_context(temporary))
            with progress_bar(quiet) as progress:
                plan = make_plan([cache], folder, eps, Options(granularity.value), None, progress)
                [result] = run(plan, progress)
                report = audit([result.task.target], [cache], progress)
        if as_json:
            pruned = report_json(result)
            print_json({"command": "demo", "eps": eps, **pruned, "verify": audit_json(report)})
            return _verdict(report)
        say(f"certk prune {cache} -o {folder} --eps {eps:g} --granularity {granularity.value}")
        if out is None:
            say("(a temporary folder, removed at the end; keep the output with -o DIR)")
        show_layers(result.layers, eps)
        say("")
        say(f"certk verify {result.task.target} --against {cache}")
        show_audit(report)
        return _verdict(report)

    return job


app.command("plan")(plan_command)


def _max_keep(text: str | None) -> int | float | None:
    """An integer is a count, anything else a fraction."""
    if text is None:
        return None
    try:
        return int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        raise CertkError(
            f"--max-keep {text!r}: give a whole number of keys or a fraction in (0, 1]"
        ) from None


def _check_new(path: Path) -> None:
    if os.path.lexists(path):
        raise CertkError(f"{path} exists already: nothing is overwritten; choose another name")
    if not path.absolute().parent.is_dir():
        raise CertkError(f"{path}: there is no directory {path.parent}: make it first")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise CertkError(f"{path}: {path.parent} cannot be written to: choose another directory")


def _example() -> Path:
    """The example of the repository, from its root or from anywhere in a checkout."""
    here = Path.cwd()
    roots = [here, *here.parents, *Path(__file__).resolve().parents]
    for root in roots:
        if (root / _EXAMPLE).is_file():
            found = root / _EXAMPLE
            return found.relative_to(here) if found.is_relative_to(here) else found
    raise CertkError(
        f"{_EXAMPLE} was not found: run certk demo inside a checkout of the repository, or give a "
        "cache of your own with --data FILE"
    )


def _distinct(paths: Iterator[Path]) -> list[Path]:
    return list({path.resolve(): path for path in paths}.values())


def _verdict(report: Audit) -> int:
    if report.holds:
        return 0
    bad = sum(not output.holds for output in report.outputs)
    where = next((f"{o.path}: {o.findings[0]}" for o in report.outputs if not o.holds), None)
    lone = f"{len(report.unmatched)} inputs without an output" if report.unmatched else ""
    first = f" (first: {where})" if where else ""
    what = f"{bad} of {len(report.outputs)} outputs do not hold{first}" if bad else ""
    return _fail("failed: " + "; ".join(filter(None, (what, lone))), 1)


def _selection_json(
    selection: Selection, scores: Path, eps: float, out: Path | None
) -> dict[str, Any]:
    return {
        "command": "select",
        "scores": str(scores),
        "output": None if out is None else str(out),
        "shape": list(selection.shape),
        "eps": eps,
        "rows": selection.k.size,
        "kept": int(selection.k.sum()),
        "worst_tail_mass": float(selection.tail_mass_upper.max(initial=0.0)),
        "rows_minimal": int(selection.minimal.sum()),
        "rows_over_budget": int((selection.status == Status.OVER_BUDGET).sum()),
        "rows_empty": int((selection.status == Status.EMPTY).sum()),
    }
