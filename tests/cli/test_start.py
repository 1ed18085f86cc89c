"""How the program starts: what it imports for which question, and Ctrl-C while it does."""

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


def moments(imports: int) -> list[int]:
    """All of the first imports, and some of all."""
    return [*range(1, 10), *range(10, imports + 1, imports // 16)]


@posix
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "-h"], PLAN, ["verify", "none"]])
def test_ctrl_c_at_any_moment_of_start_up(arguments: list[str], tmp_path: Path) -> None:
    """Also where NumPy is being imported, in C, which would make another error of it."""
    with Starts(tmp_path) as starts:
        whole = starts.run(arguments)
        assert whole.imports > 100
        for at in moments(whole.imports):
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

SLOW = ("numpy", "rich")
SHELL = {
    "bash": {"COMP_WORDS": "certk {}", "COMP_CWORD": "{}"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "certk {}"},
    "fish": {"_TYPER_COMPLETE_ARGS": "certk {}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


def loaded(arguments: list[str], **environment: str) -> tuple[set[str], str]:
    """The modules that the program has imported when it ends, and what it has printed."""
    code = f"""
import sys
from certk_rs.cli import main
sys.argv = ["certk", *{arguments}]
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
    done = run_python(code, **environment)
    return set(done.stderr.split()), done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["-V"], ["--help"], [], *([name, "--help"] for name in BRIEF), ["plan", "--x"]],
)
def test_a_question_waits_for_no_module_that_its_answer_does_not_need(
    arguments: list[str],
) -> None:
    modules, _ = loaded(arguments)
    assert "certk_rs._cli.program" in modules
    assert not {name.partition(".")[0] for name in modules} & set(SLOW)
    own = {name for name in BRIEF if f"certk_rs._cli.{name}" in modules}
    assert own <= {name for name in arguments if name in BRIEF}
    assert ("typer" in modules) == (arguments not in (["--version"], ["-V"]))


@pytest.mark.parametrize("shell", SHELL)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pr", "prune"),
        ("", "verify"),
        ("prune -o out --granularity ", "token"),
        ("prune x.safetensors --gran", "--granularity"),
        ("plan --n 6 --si", "--sigma"),
    ],
)
def test_a_completion_waits_for_no_array(shell: str, words: str, found: str) -> None:
    asked = {"_CERTK_COMPLETE": f"complete_{shell}"} | SHELL[shell]
    number = len(f"certk {words}x".split()) - 1
    environment = {
        name: value.format(number if name == "COMP_CWORD" else words)
        for name, value in asked.items()
    }
    modules, said = loaded([], **environment)
    assert found in said
    assert "numpy" not in modules


def test_lines_of_help_are_the_first_of_each_command() -> None:
    commands = tree().commands
    assert list(commands) == list(BRIEF)
    for name, said in BRIEF.items():
        first = inspect.getdoc(commands[name].callback).split("\n\n")[0]
        assert " ".join(first.split()) == said, name
        # In one line of 80 columns, behind the longest name.
        assert len(said) <= 64, name


def test_python_files_of_commands_import_nothing_slow() -> None:
    """So that a question for help costs little, and a completion, which looks at all of them."""
    code = "from certk_rs._cli.tree import tree; dict(tree().commands.items()); import sys; "
    done = run_python(code + "print(*sys.modules)")
    modules = set(done.stdout.split())
    assert {f"certk_rs._cli.{name}" for name in BRIEF} <= modules
    assert not {name.partition(".")[0] for name in modules} & set(SLOW)
    assert {name for name in modules if name.startswith("certk_rs.jobs.")} == {
        *("certk_rs.jobs.progress", "certk_rs.jobs.request", "certk_rs.jobs.budgets")
    }
