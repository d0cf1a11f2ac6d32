"""Rarely set fields of a part: left out of its `repr` and of its table while they have their default.

The schema of messages is a hash of `repr(method)`, and the digest of an experiment is a hash of its table: a new field
declared with `metadata={"rare": True}` changes neither of them where it is not used.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any


def is_left_out(part_field: Field[Any], value: Any) -> bool:
    """Whether a field of a part is rarely set and has its default.

    >>> from dataclasses import dataclass, field
    >>> @dataclass
    ... class Step:
    ...     size: float = 1.0
    ...     limit: float = field(default=9.0, metadata={"rare": True})
    >>> [is_left_out(f, 9.0) for f in fields(Step)]
    [False, True]
    """
    return bool(part_field.metadata.get("rare")) and bool(value == part_field.default)


def short_repr(part: Any) -> str:
    """The `repr` of a dataclass without the fields that are left out.

    >>> from thinwire.optimizers.sgd import SGD
    >>> SGD(0.5), SGD(0.5, clip_norm=1.0)  # doctest: +NORMALIZE_WHITESPACE
    (SGD(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0),
     SGD(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=1.0))
    """
    shown = ((f, getattr(part, f.name)) for f in fields(part) if f.repr)
    given = ", ".join(f"{f.name}={value!r}" for f, value in shown if not is_left_out(f, value))
    return f"{type(part).__qualname__}({given})"
