"""Values that cannot be trained on, named by client and row: NaN and infinity, class labels out of range.

All values are read once, in chunks. Images stored as bytes have only finite values and are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from thinwire.data.examples import Examples, Inputs
from thinwire.errors import DataError
from thinwire.metrics.labels import IGNORED

if TYPE_CHECKING:
    from thinwire.data.partitions.base import Assignment

AT_ONCE = 1 << 22  # values that are read together


@dataclass(frozen=True, eq=False)
class Part:
    """The training examples of all clients, or the test examples.

    Args:
        examples: the examples.
        clients: the examples of each client; None for test examples.
    """

    examples: Examples
    clients: Assignment | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return "the test set" if self.clients is None else "client 0"

    def batch(self, rows: int) -> tuple[Inputs, Tensor]:
        """The first examples, and those with the lowest and the highest class label; repeated if there are fewer."""
        order = np.arange(len(self.examples)) if self.clients is None else self.clients.order
        chosen = order[np.arange(rows) % len(order)]
        targets = self.examples.targets
        if targets.dim() == 1 and is_integer(targets):
            own = targets[torch.from_numpy(order)]
            chosen = np.concatenate((chosen, order[[int(own.argmin()), int(own.argmax())]]))
        return self.examples.gather(torch.from_numpy(chosen))

    def place(self, bad: Tensor) -> tuple[str, int] | None:
        """Where the first of some rows is, in words, and its number; None if no client has one of them."""
        rows = bad.cpu().numpy()
        if self.clients is None:
            return f"the test set, row {rows[0]}{_more(len(rows))}", int(rows[0])
        at = np.flatnonzero(np.isin(self.clients.order, rows))
        if not len(at):
            return None
        client = int(np.searchsorted(self.clients.offsets, at[0], side="right")) - 1
        row = int(at[0] - self.clients.offsets[client])
        return f"client {client}, row {row}{_more(len(at))}", int(self.clients.order[at[0]])

    def refuse(self, bad: Tensor, what: Callable[[int], str]) -> None:
        """Raise a DataError about the first of some rows, described by `what(row)`."""
        if len(bad) and (found := self.place(bad)) is not None:
            raise DataError(f"{found[0]}: {what(found[1])}; rows count from 0")

    def check_finite(self) -> None:
        """Raise a DataError for an input or a target that is not finite."""
        inputs = getattr(self.examples, "inputs", None)
        named = inputs if isinstance(inputs, Mapping) else {"input": inputs}
        for name, values in {**named, "target": self.examples.targets}.items():
            if isinstance(values, Tensor) and values.is_floating_point():
                self.refuse(_rows_where(values, _not_finite), lambda row, n=name, v=values: _describe(n, v[row]))  # type: ignore[misc]

    def check_labels(self, classes: int, ignored: int = IGNORED) -> None:
        """Raise a DataError for a class label out of range, and for a client without any label."""
        labels = self.examples.targets

        def wrong(row: int) -> str:
            own = labels[row].flatten()
            label = int(own[(own != ignored) & ((own < 0) | (own >= classes))][0])
            fits = f"the model has {classes} outputs (labels 0 to {classes - 1})"
            hint = f"; a label to ignore is {ignored}" if label < 0 else ""
            return f"label {label}, but {fits}{hint}"

        self.refuse(_rows_where(labels, lambda y: (y != ignored) & ((y < 0) | (y >= classes))), wrong)
        known = (labels != ignored).reshape(len(labels), -1).any(1).cpu().numpy()
        for name, rows in [("the test set", known)] if self.clients is None else self._labeled(known):
            if not rows.any():
                raise DataError(f"all labels of {name} are {ignored}, which is ignored; give it labels or leave it out")

    def _labeled(self, known: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """The clients without any label; reduceat counts in one pass."""
        assert self.clients is not None
        counts = np.add.reduceat(known[self.clients.order].astype(np.int64), self.clients.offsets[:-1])
        return [(f"client {i}", known[self.clients.client(i)]) for i in np.flatnonzero(counts == 0)[:1]]

    def check_binary(self) -> None:
        """Raise a DataError for a target of `bce` that is not from 0 to 1, or -100 among integers."""
        targets = self.examples.targets
        if targets.dtype == torch.bool:
            return
        ignored = math.nan if targets.is_floating_point() else IGNORED
        bad = _rows_where(targets, lambda y: (y != ignored) & ((y < 0) | (y > 1)))

        def wrong(row: int) -> str:
            own = targets[row].flatten()
            return f"target {own[(own != ignored) & ((own < 0) | (own > 1))][0].item():g}, but loss 'bce' takes 0 or 1"

        self.refuse(bad, wrong)


def is_integer(values: Tensor) -> bool:
    """Whether a tensor holds integers; booleans are none."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def different_shapes(inputs: list[Any], targets: list[Tensor]) -> str:
    """The first client whose examples differ in shape or type from client 0's, in words; empty if there is none.

    >>> different_shapes([torch.zeros(3, 4), torch.zeros(5, 2)], [torch.zeros(3), torch.zeros(5)])
    'client 1 has inputs of shape [2], client 0 of shape [4]; all examples need one shape'
    """
    for what, all_of in (("inputs", inputs), ("targets", targets)):
        for i, one in enumerate(all_of):
            if isinstance(one, Mapping) != isinstance(all_of[0], Mapping):
                return f"client {i} has {what} of type {type(one).__name__}, client 0 {type(all_of[0]).__name__}"
            if isinstance(one, Mapping):
                if set(one) != set(all_of[0]):
                    return f"client {i} has inputs named {sorted(one)}, client 0 {sorted(all_of[0])}"
                for name in one:
                    if text := _differs(i, f"{what} {name!r}", one[name], all_of[0][name]):
                        return text
            elif text := _differs(i, what, one, all_of[0]):
                return text
    return ""


def _differs(client: int, what: str, one: Tensor, first: Tensor) -> str:
    if one.shape[1:] == first.shape[1:]:
        return ""
    shapes = f"client {client} has {what} of shape {list(one.shape[1:])}, client 0 of shape {list(first.shape[1:])}"
    return f"{shapes}; all examples need one shape"


def _rows_where(values: Tensor, bad: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows that have a bad value, read in chunks."""
    step = max(1, AT_ONCE // max(1, math.prod(values.shape[1:])))
    found = []
    for first in range(0, len(values), step):
        wrong = bad(values[first : first + step])
        if wrong.any():
            found.append(first + wrong.reshape(len(wrong), -1).any(1).nonzero()[:, 0])
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _not_finite(values: Tensor) -> Tensor:
    return ~torch.isfinite(values)


def _describe(name: str, values: Tensor) -> str:
    """The first value of a row that is not finite."""
    at = _not_finite(values).nonzero()[0].tolist()
    where = f" at position {at}" if at else ""
    word = name if name in ("input", "target") else f"input {name!r}"
    return f"the {word} is {values[tuple(at)].item()}{where}; remove or replace values that are not finite"


def _more(count: int) -> str:
    return f" (and {count - 1:,} more)" if count > 1 else ""
