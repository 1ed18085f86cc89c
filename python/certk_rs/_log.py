"""What the library says of its work, to whoever listens: loggers below "certk_rs".

Nobody listens by default, not even for warnings; `certk -v` does, and so may any program through
`logging`. Modules take theirs as `_log = logger("jobs.prune")`.
"""

from __future__ import annotations

import logging

ROOT = "certk_rs"

logging.getLogger(ROOT).addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    """The logger of a module, `name` being what follows "certk_rs."."""
    return logging.getLogger(f"{ROOT}.{name}")
