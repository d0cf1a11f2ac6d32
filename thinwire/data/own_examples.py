"""The examples of one client as tensors, from what people have: tensors, numpy arrays, Datasets, DataLoaders.

>>> inputs, targets = as_tensors((np.zeros((3, 2)), np.array([0, 1, 0])), "client 0")
>>> inputs.dtype, targets.dtype, inputs.shape
(torch.float32, torch.int64, torch.Size([3, 2]))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.text import visible
from thinwire.data.examples import Inputs
from thinwire.errors import ConfigError

MOST_EXAMPLES = 100_000_000  # of one client: an iterable without an end is refused


def as_tensors(data: Any, what: str) -> tuple[Inputs, Tensor]:
    """Inputs and targets with one row for each example.

    Args:
        data: a pair `(inputs, targets)` of tensors or numpy arrays, where inputs may also be a dictionary of these; a
            torch Dataset whose items are such pairs of one example; or a DataLoader, which is read once.
        what: whose examples these are, for error messages.
    """
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray):
        inputs, targets = data
    elif _is_batches(data):
        inputs, targets = _from_batches(data, what)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | Mapping):
        inputs, targets = _from_items(data, what)
    else:
        raise ConfigError(
            f"{what} must be a pair (inputs, targets) of tensors or numpy arrays, a torch Dataset or a DataLoader, not "
            f"{type(data).__name__}"
        )
    inputs, targets = _tensors(inputs, f"{what}: inputs"), _tensor(targets, f"{what}: targets")
    rows = {len(block) for block in inputs.values()} if isinstance(inputs, dict) else {len(inputs)}
    if rows != {len(targets)}:
        raise ConfigError(
            f"{what} has {sorted(rows)} inputs but {len(targets)} targets; give one target for each input"
        )
    if not len(targets):
        raise ConfigError(f"{what} has no examples; leave empty clients out")
    return inputs, targets


def _is_batches(data: Any) -> bool:
    """Whether it is a DataLoader or an IterableDataset: something to iterate over that cannot be indexed."""
    if isinstance(data, str | bytes | Mapping):
        return False
    iterable = any(base.__name__ == "IterableDataset" for base in type(data).__mro__)  # its base class has __getitem__
    return iterable or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _from_items(data: Any, what: str) -> tuple[Any, Any]:
    """All items of a dataset, stacked."""
    if not len(data):
        raise ConfigError(f"{what} has no examples; leave empty clients out")
    return _collated([data[i] for i in range(len(data))], what)


def _from_batches(data: Any, what: str) -> tuple[Any, Any]:
    """All batches of a DataLoader, or all items of an IterableDataset, one after another."""
    if getattr(data, "drop_last", False):
        raise ConfigError(
            f"{what}: this DataLoader leaves out the last examples; write DataLoader(..., drop_last=False)"
        )
    single = getattr(data, "batch_size", None) is None and getattr(data, "batch_sampler", None) is None
    items, count = [], 0
    for item in data:
        items.append(item)
        count += 1 if single or not isinstance(item, tuple | list) else len(item[-1])
        if count > MOST_EXAMPLES:
            raise ConfigError(f"{what} gives more than {MOST_EXAMPLES:,} examples; it must have an end")
    if not items:
        raise ConfigError(f"{what} has no examples; leave empty clients out")
    if single:
        return _collated(items, what)
    try:
        pairs = [(x, y) for x, y in items]
        first = pairs[0][0]
        if isinstance(first, Mapping):
            return {name: torch.cat([x[name] for x, _ in pairs]) for name in first}, torch.cat([y for _, y in pairs])
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    except Exception as error:
        reason = visible(str(error), 300)
        raise ConfigError(f"{what}: the batches must be pairs (inputs, targets) of one shape: {reason}") from error


def _collated(items: list[Any], what: str) -> tuple[Any, Any]:
    """Single examples, stacked."""
    from torch.utils.data import default_collate  # imported late: it imports multiprocessing

    try:
        inputs, targets = default_collate(items)
    except Exception as error:
        reason = visible(str(error), 300)
        raise ConfigError(
            f"{what}: the items of the dataset must be pairs (input, target) of one shape: {reason}"
        ) from error
    return inputs, targets


def _tensors(values: Any, what: str) -> Inputs:
    """Inputs as one tensor, or as named tensors."""
    if isinstance(values, Mapping):
        return {str(name): _tensor(one, f"{what} {name!r}") for name, one in values.items()}
    return _tensor(values, what)


def _tensor(values: Any, what: str) -> Tensor:
    """A tensor as it is; an array with floats as float32 and integers as int64, the types of torch's layers."""
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or not values.ndim:
        kind = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ConfigError(f"{what} must be a tensor or a numpy array of numbers, one row per example, not {kind}")
    if values.dtype == np.uint8 and values.ndim > 1:
        return torch.from_numpy(np.ascontiguousarray(values))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32 if values.dtype.kind == "f" else np.int64))
