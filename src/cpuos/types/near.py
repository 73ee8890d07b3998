"""The name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["near_details", "nearest"]


def nearest(given: str, known: Iterable[str]) -> str:
    """The nearest of the known ones; empty where none is near."""
    return next(iter(difflib.get_close_matches(given, sorted(known), n=1)), "")


def near_details(given: str, known: Iterable[str]) -> dict[str, str]:
    """For an error's details: what was given, and the nearest there is. Empty where none is near."""
    near = nearest(given, known)
    return {"given": given, "near": near} if near else {}
