"""Refuse arguments that cannot work, in one line, before a network exists.

>>> at_least(2, classes=10)
>>> at_least(2, classes=1)
Traceback (most recent call last):
    ...
thinwire.errors.ConfigError: classes = 1: expected a whole number of at least 2
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from thinwire.errors import ConfigError, UnknownName


def at_least(least: int, **given: int) -> None:
    """Each named argument is a whole number, and not below `least`."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} = {value!r}: expected a whole number of at least {least}")


def one_of(known: Iterable[str], **given: str) -> None:
    """Each named argument is one of the known words."""
    words = tuple(known)
    for name, value in given.items():
        if value not in words:
            raise UnknownName(name, str(value), words)


def probability(**given: float) -> None:
    """Each named argument is at least 0 and below 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} = {value!r}: expected a number from 0 up to, but not including, 1")


def divides(groups: int, widths: Iterable[int]) -> None:
    """Group normalisation can cut every one of these widths into equal groups."""
    for width in widths:
        if width % groups:
            raise ConfigError(f"groups = {groups}: does not divide a layer of {width} channels; take a power of two")


def pictures(x: Tensor, channels: int, *, exact: int | None = None, least: int = 1) -> None:
    """The batch holds pictures (n, channels, height, width) of the size the network was made for.

    Only shapes are looked at, so this costs nothing and works under `vmap`.
    """
    shape = tuple(x.shape[1:])
    if exact is not None and shape != (channels, exact, exact):
        raise ConfigError(
            f"pictures of shape {shape} in a network for {(channels, exact, exact)}: "
            "build the model with the data's channels= and size="
        )
    if len(shape) != 3 or shape[0] != channels or min(shape[1:]) < least:
        raise ConfigError(
            f"pictures of shape {shape}: this network takes ({channels}, {least} or more, {least} or more)"
        )
