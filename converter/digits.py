"""Whole numbers in texts that people and tools write."""

from __future__ import annotations

MAX_DIGITS = 15


def whole_number(text: str) -> int | None:
    """The number whose decimal ASCII digits a text is; None for any other text, and for more than 15 digits.

    `int` would take signs, spaces, underscores and the digits of every script, `str.isdigit` even such that `int` refuses.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None
