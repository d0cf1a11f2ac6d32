"""Argument checks of models, which raise a ConfigError of one line.

>>> at_least(2, classes=10)
>>> at_least(2, classes=1)
Traceback (most recent call last):
    ...
thinwire.errors.ConfigError: classes = 1: expected an integer of at least 2
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

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


def divides(groups: int, widths: Iterable[int]) -> None:
    """Check that the number of groups of a group norm divides each of these widths."""
    for width in widths:
        if width % groups:
            raise ConfigError(f"groups = {groups}: does not divide a layer of {width} channels; write a power of two")


def check_images(x: Tensor, channels: int, *, exact: tuple[int, int] | None = None, least: int = 1) -> None:
    """Check that a batch holds images (n, channels, height, width) of the size of the model.

    It reads shapes only, so it works under `vmap`.
    """
    shape = tuple(x.shape[1:])
    if exact is not None and shape != (channels, *exact):
        raise ConfigError(
            f"images of shape {shape} in a model for {(channels, *exact)}: "
            "build the model with the channels= and size= of the data"
        )
    if len(shape) != 3 or shape[0] != channels or min(shape[1:]) < least:
        raise ConfigError(f"images of shape {shape}: this model takes ({channels}, {least} or more, {least} or more)")
