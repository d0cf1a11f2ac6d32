"""Check that fields of a dataclass that are numbers were given numbers, not text.

>>> @dataclasses.dataclass
... class Rate:
...     lr: float = 0.1
...     def __post_init__(self):
...         check_numbers(self)
>>> Rate("0.1")
Traceback (most recent call last):
thinwire.errors.ConfigError: lr must be a number, not the text '0.1'; write lr = 0.1
"""

from __future__ import annotations

import dataclasses
from numbers import Integral, Real
from typing import Any

from thinwire.errors import ConfigError


def check_numbers(part: Any) -> None:
    """Raise ConfigError unless fields annotated `int` hold whole numbers, and those annotated `float` numbers.

    Numbers of numpy are numbers. A tensor is accepted for a float: recorded training has the learning rate in one.
    """
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.type in ("int", int):
            right, wanted = isinstance(value, Integral) and not isinstance(value, bool), "a whole number"
        elif field.type in ("float", float):
            right, wanted = isinstance(value, Real) or hasattr(value, "dtype"), "a number"
        else:
            continue
        if not right:
            raise ConfigError(f"{field.name} must be {wanted}, not {_shown(field.name, value)}")


def _shown(name: str, value: Any) -> str:
    """The value, and what to write if it is the text of a number."""
    if not isinstance(value, str):
        return repr(value)
    try:
        float(value)
    except ValueError:
        return f"the text {value!r}"
    return f"the text {value!r}; write {name} = {value}"
