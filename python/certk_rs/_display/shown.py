"""The names that all results have: `summary`, `to_pandas`, and the form that notebooks show.

A result says its columns (`_columns`, a row of the frame per row or set). Everything optional is
imported when it is asked for, and nothing is computed before: making a result takes no longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CertkError, pip_install
from .plain import plain

if TYPE_CHECKING:
    from pandas import DataFrame

_BOX = (
    '<pre style="display:inline-block;border-left:3px solid #3b6fb6;margin:.3em 0;'
    'padding:.2em .8em;overflow-x:auto;max-width:100%">'
)


class Shown:
    """The names that all results have in common."""

    __slots__ = ()

    def summary(self) -> str:
        """Return a few lines of text, bounds rounded so that they are still bounds."""
        raise NotImplementedError

    def to_pandas(self) -> DataFrame:
        """Return a new pandas DataFrame: a line per row (set, file or call), a column per number.

        Raises:
            CertkError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise CertkError(
                f"to_pandas needs pandas, which is not installed: {pip_install('pandas')}"
            ) from None
        columns = self._columns()
        return pandas.DataFrame(dict(columns), index=self._index(pandas))

    def _repr_html_(self) -> str:
        """Return the summary for a notebook, escaped, with nothing from elsewhere."""
        import html  # has a table of entities, which only notebooks need

        text = "\n".join(map(plain, self.summary().split("\n")))
        return f"{_BOX}{html.escape(text)}</pre>"

    def _columns(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def _index(self, _pandas: Any) -> Any:
        return None


def per_row(shape: Sequence[int], **columns: Any) -> dict[str, Any]:
    """Return columns of one number per row; a single number stands for all rows. None is left out.

    Args:
        shape: The batch shape, by which rows are numbered.
        columns: Arrays of that shape, or of shape ().
    """
    return {
        name: np.broadcast_to(np.asarray(values), shape).reshape(-1)
        for name, values in columns.items()
        if values is not None
    }


def row_index(pandas: Any, shape: Sequence[int]) -> Any:
    """Return the index of rows in a batch: their number, or with several axes all of these."""
    if len(shape) < 2:
        return pandas.RangeIndex(prod(shape), name="row")
    axes = [range(n) for n in shape]
    return pandas.MultiIndex.from_product(axes, names=[f"axis_{i}" for i in range(len(shape))])
