"""Start of the program: the imports of each command, and Ctrl-C while they run."""

from __future__ import annotations

import inspect
import json
import os
import signal
from pathlib import Path

import pytest

from certk_rs import cli
from certk_rs._cli import signals
from certk_rs._cli.answer import Answer
from certk_rs._cli.commands import BRIEF
from certk_rs._cli.tree import tree
from fresh_process import run_python
from interrupted_start import Starts

PLAN = ["plan", "--n", "100", "--sigma", "2", "--eps", "0.1"]
posix = pytest.mark.skipif(os.name != "posix", reason="forks, and sends signals of POSIX")


# ------------------------------------------------------------------------------------ signals


def moments(imports: int, some: int = 6) -> list[int]:
    """All of the first imports, and some of all."""
    return [*range(1, 10), *range(10, imports + 1, imports // some)]


@posix
@pytest.mark.parametrize(
    ("arguments", "some"),
    [
        (["--help"], 2),
        (PLAN, 10),
        (["verify", "none"], 6),
        *(
            pytest.param(words.split(), 64, marks=pytest.mark.heavy)
            for words in ("--help", "plan -h", " ".join(PLAN), "verify none")
        ),
    ],
)
def test_ctrl_c_at_any_moment_of_start_up(arguments: list[str], some: int, tmp_path: Path) -> None:
    """Also where NumPy is being imported, in C, which would make another error of it."""
    with Starts(tmp_path) as starts:
        whole = starts.run(arguments)
        assert whole.imports > 100
        for at in moments(whole.imports, some):
            ended = starts.run(arguments, at, signal.SIGINT)
            assert (ended.code, ended.err) == (130, "certk: interrupted\n"), at
            # What is printed is printed when it is known, as ever.
            assert whole.out.startswith(ended.out), at


@posix
def test_json_is_promised_from_the_first_moment(tmp_path: Path) -> None:
    with Starts(tmp_path) as starts:
        whole = starts.run([*PLAN, "--json"])
        for at in moments(whole.imports)[8:]:
            ended = starts.run([*PLAN, "--json"], at, signal.SIGINT)
            assert ended.code == 130
            said = json.loads(ended.out)
            assert (said["schema"], said["command"]) == (1, "plan")
            assert said["error"]["exit_code"] == 130


@posix
def test_sigterm_at_some_moments_of_start_up(tmp_path: Path) -> None:
    with Starts(tmp_path) as starts:
        # The first ten are imported before the program listens: it ends in silence then.
        for at in moments(starts.run(PLAN).imports)[10:]:
            ended = starts.run(PLAN, at, signal.SIGTERM)
            assert (ended.code, ended.err) == (143, "certk: terminated\n"), at


@pytest.mark.parametrize("command", ["plan", None])
def test_the_object_without_modules_is_that_of_the_answer(command: str | None) -> None:
    answer = Answer()
    answer.begin(True, command)
    answer.failed("terminated", "interrupted")
    assert signals.ended_object(command, "terminated", 143) == f"{answer.take(143)}\n"


@posix
def test_signals_that_are_ignored_stay_so() -> None:
    code = """
import os, signal, sys
from certk_rs._cli import terminal
from certk_rs.cli import main
signal.signal(signal.SIGINT, signal.SIG_IGN)
say = terminal.print_json

def interrupted(body):
    os.kill(os.getpid(), signal.SIGINT)
    say(body)

terminal.print_json = interrupted
sys.argv = ["certk", "plan", "--n", "9", "--sigma", "1", "--eps", "0.1", "--json"]
sys.exit(main())
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["command"] == "plan"


def test_with_arguments_handlers_are_left_as_they_were() -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["--version"]) == 0
    assert cli.main([*PLAN]) == 0
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interruption_that_became_another_error_is_one_all_the_same(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from certk_rs import gaussian
from certk_rs.cli import main

def plan(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("numpy.core.multiarray failed to import")

gaussian.plan = plan
sys.argv = ["certk", "plan", "--n", "9", "--sigma", "1", "--eps", "0.1"]
sys.exit(main())
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (130, "certk: interrupted\n")


# ------------------------------------------------------------------------------------ imports

# Calls in their order, each with the commands that have been imported behind it.
QUESTIONS = """
import json, os, sys
from certk_rs.cli import main
from certk_rs._cli.commands import BRIEF

def ask(*arguments, **environment):
    os.environ.update(environment)
    sys.argv = ["certk", *arguments]
    sys.stdout.flush()
    try:
        main()
    except SystemExit:
        pass
    files = {name: f"{name}_" if name == "import" else name for name in BRIEF}
    own = [name for name, file in files.items() if f"certk_rs._cli.{file}" in sys.modules]
    slow = {"numpy", "rich"} & {name.partition(".")[0] for name in sys.modules}
    print(json.dumps([arguments, own, "typer" in sys.modules, sorted(slow)]), file=sys.stderr)

"""
COMPLETIONS = [
    ("pr", "prune"),
    ("", "verify"),
    ("prune -o out --granularity ", "token"),
    ("prune x.safetensors --gran", "--granularity"),
    ("plan --n 6 --si", "--sigma"),
]


def test_a_question_waits_for_no_module_that_its_answer_does_not_need() -> None:
    calls = ["--version", "-V", "--help", "", *(f"{name} --help" for name in BRIEF), "plan --x"]
    done = run_python(f"{QUESTIONS}for call in {calls}: ask(*call.split())")
    asked = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    assert len(asked) == len(calls)
    known: set[str] = set()
    for arguments, own, parsed, slow in asked:
        known |= {name for name in arguments if name in BRIEF}
        assert set(own) == known, arguments
        assert parsed == (arguments not in (["--version"], ["-V"])) or known
        assert not slow, arguments


def test_a_completion_waits_for_no_array() -> None:
    """Nor for any command but the one that it is about, once there is one."""
    calls = [(words, len(f"certk {words}x".split()) - 1) for words, _ in COMPLETIONS]
    done = run_python(
        f"{QUESTIONS}for words, at in {calls}: ask(_CERTK_COMPLETE='complete_bash', "
        "COMP_WORDS=f'certk {words}', COMP_CWORD=str(at)); print('--')"
    )
    for said, (_, found) in zip(done.stdout.split("--\n"), COMPLETIONS, strict=False):
        assert found in said.split()
    assert all(json.loads(line)[3] == [] for line in done.stderr.splitlines())


def test_lines_of_help_are_the_first_of_each_command() -> None:
    commands = tree().commands
    assert list(commands) == list(BRIEF)
    for name, said in BRIEF.items():
        first = inspect.getdoc(commands[name].callback).split("\n\n")[0]
        assert " ".join(first.split()) == said, name
        # In one line of 80 columns, behind the longest name.
        assert len(said) <= 64, name
