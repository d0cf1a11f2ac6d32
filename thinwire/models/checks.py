"""Argument checks of models, which raise a ConfigError of one line.

>>> at_least(2, classes=10)
>>> at_least(2, classes=1)
Traceback (most recent call last):
    ...
thinwire.errors.ConfigError: classes = 1: expected an integer of at least 2
"""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.errors import ConfigError, UnknownName


def at_least(least: int, **given: int) -> None:
    """Check that each named argument is an integer of at least `least`."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} = {value!r}: expected an integer of at least {least}")


def one_of(known: Iterable[str], **given: str) -> None:
    """Check that each named argument is one of the known strings."""
    words = tuple(known)
    for name, value in given.items():
        if value not in words:
            raise UnknownName(name, str(value), words)


def probability(**given: float) -> None:
    """Check that each named argument is at least 0 and below 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} = {value!r}: expected a probability of at least 0 and below 1")
