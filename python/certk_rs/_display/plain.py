"""Text as it may be shown: whatever a file, a name or an argument holds, it stays one plain line.

Names of tensors and files, metadata and messages of exceptions are anybody's. A terminal obeys
escape sequences in them, a newline begins what looks like a line of ours, and marks of direction
turn around what is read. Everything that is shown passes through here, last.
"""

from __future__ import annotations

# Longer lines are no message any more; two paths of the greatest length fit.
_LONGEST = 10_000
_ENDS = 4_000


def plain(text: str) -> str:
    """Return one line that shows `text`, cut where it is far too long."""
    if len(text) > _LONGEST:
        left_out = len(text) - 2 * _ENDS
        text = f"{text[:_ENDS]} ... ({left_out} characters) ... {text[-_ENDS:]}"
    return escaped(text)


def escaped(text: str) -> str:
    """Return one line: what is not printable is written as Python writes it in strings."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
