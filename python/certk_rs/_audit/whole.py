"""What an output says of all its layers together: budgets, sets that layers share, its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..cache_format import Certificate, Layer
from .claims import Claims, Note
from .sense import check_coverage

_WHERE = "metadata certk"


def check_budgets(certificate: Certificate, layers: Sequence[Layer], note: Note) -> bool:
    """Budgets are one for each group, and can be asked for; tell whether they are."""
    options, complaint = certificate.options, None
    by_head = options.granularity == "head"
    groups = {layer.index: layer.kv_heads if by_head else 1 for layer in layers}
    for what, budgets in (("eps", certificate.eps), ("bound_eps", certificate.bound_eps)):
        if budgets is None:
            continue
        all_of_them = [budget for each in budgets.values() for budget in each]
        wrong = [budget for budget in all_of_them if not 0 <= budget < 1]
        if {index: len(each) for index, each in budgets.items()} != groups:
            complaint = f"its {what} is not one budget for each group of each layer"
        elif wrong:
            complaint = f"its {what} is {wrong[0]!r}"
        elif options.granularity == "token" and len(set(all_of_them)) > 1:
            complaint = f"its {what} is not the same in all layers, which share one set"
        elif what == "bound_eps" and options.size is not None and len(set(all_of_them)) > 1:
            complaint = "its bound_eps is not one number, as a size for all groups needs"
        if complaint:
            break
    if complaint is None:
        complaint = _of_all_groups(certificate, layers)
    if complaint is not None:
        note(_WHERE, complaint)
    return complaint is None


def _of_all_groups(certificate: Certificate, layers: Sequence[Layer]) -> str | None:
    """What is wrong with options that speak of all layers at once."""
    options = certificate.options
    bounded = options.proof != "none" and options.size is not None and not options.hot
    if bounded and certificate.bound_eps is None:
        return "it has a size, but no bound_eps that its lower bounds refer to"
    if options.granularity == "token" and len({layer.n for layer in layers}) > 1:
        return "its layers have different numbers of keys, but share one set by token"
    return None


def check_whole(layers: Sequence[Claims], certificate: Certificate, note: Note) -> list[Claims]:
    """Check what layers say together, each of which makes sense; those that are to be recomputed.

    By token that is all of them or none.
    """
    options = certificate.options
    for place, group in _groups(layers, options.granularity):
        problem = check_coverage(group, certificate)
        if problem is not None:
            note(place, problem)
    if options.granularity != "token":
        _check_size(layers, certificate, note)
        return list(layers)
    if not layers:
        return []
    first = layers[0]
    _check_size([first], certificate, note)
    fine = True
    for claims in layers[1:]:
        for name in ("indices", "lower_bound"):
            mine, theirs = np.asarray(getattr(first, name)), np.asarray(getattr(claims, name))
            if not np.array_equal(mine, theirs):
                what = f"is not that of layer {first.layer.index}, with which it shares one set"
                note(claims.stem + name, what)
                fine = False
    heaviest = max(claims.heaviest for claims in layers)
    return [replace(claims, heaviest=heaviest) for claims in layers] if fine else []


def _groups(
    layers: Sequence[Claims], granularity: str
) -> list[tuple[str, list[tuple[Claims, slice]]]]:
    """Of every group a place to name, and its query heads."""
    if granularity == "token":
        every = [(claims, claims.heads_of(0)) for claims in layers]
        return [(_WHERE, every)] if every else []
    return [
        (claims.stem + "left_out", [(claims, heads)])
        for claims in layers
        for _, _, heads in claims.groups()
        if len(claims.left_out)
    ]


def _check_size(layers: Sequence[Claims], certificate: Certificate, note: Note) -> None:
    """Keys are no more than the size allows, and bounds more, or nothing is said of less loss.

    Args:
        layers: Those that make sense; by token one of them, whose set all have.
        certificate: What is said of all.
        note: Told what does not hold.
    """
    options, budgets = certificate.options, certificate.bound_eps
    if options.size is None:
        return
    kept = sum(claims.kept for claims in layers)
    if kept > options.size:
        note(_WHERE, f"{kept} keys are kept, its size allows {options.size}")
    alike = options.granularity == "token" or len(layers) == len(certificate.scales)
    if budgets is None or options.hot or options.proof == "none" or not alike:
        return
    w = next(iter(budgets.values()))[0]
    needed = sum(claims.needed(options.block_size) for claims in layers)
    if w > 0 and needed <= options.size:
        what = f"its lower bounds for bound_eps = {w!r} add up to {needed} keys, which its size of"
        note(_WHERE, f"{what} {options.size} allows: they do not prove that less is lost by none")
