"""The names of all commands, in the order of help, with the line that help has on each.

A command is imported from its file when it is run or asked for help; this is known before.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS = {
    "Caches": {
        "capture": "Write queries, keys and values of a local model over a text.",
        "import": "Make a cache file of what another program has stored.",
        "export": "Write a cache file as another program stores it.",
        "inspect": "Show what files hold: tensors, layers, and what prune would do.",
        "analyze": "Tell whether pruning caches is worth it, and what heads need.",
        "prune": "Prune saved KV caches, with certificates.",
        "verify": "Check what prune has written.",
        "gate": "Pass or fail outputs of prune, and records of runs.",
        "report": "Tell what a prune job has done, from its outputs.",
    },
    "Rows of scores": {
        "select": "Select the fewest keys of every row of scores.",
        "plan": "Tell how many keys rows of normal scores need.",
    },
    "More": {
        "demo": "Prune a small real cache, verify it, and show each layer.",
    },
}
BRIEF = {name: said for group in GROUPS.values() for name, said in group.items()}


def named(arguments: Sequence[str]) -> str | None:
    """Return the command that arguments are for, None if there is none of that name."""
    first = next((each for each in arguments if not each.startswith("-")), None)
    return first if first in BRIEF else None


def json_is_promised(arguments: Sequence[str]) -> bool:
    """Tell whether --json was asked for, by arguments that may be no usage at all."""
    given = list(arguments)
    return "--json" in (given[: given.index("--")] if "--" in given else given)
