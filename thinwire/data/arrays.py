"""Arrays of your own: numpy arrays or torch tensors in Python, a file of `numpy.savez` on the command line.

np.savez("data.npz", x=inputs, y=targets, client=client_of_each_example)
thinwire run fedavg --on arrays --set task.file=data.npz
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.data.examples import Arrays, Examples, Images, Inputs, Source, image_values, mean_and_std, standardized
from thinwire.data.files import one_line, own_path
from thinwire.data.images import image_options
from thinwire.data.partition import held_out_rows
from thinwire.data.table import POOLED, Columns, TargetCode, listed
from thinwire.errors import DataError

_NUMBERS = "biuf"


@register(
    "dataset", "arrays", doc="Arrays x and y of your own in an .npz file, perhaps client, x_test and y_test: task.file."
)
def arrays(
    data_dir: Path | None = None,
    file: str = "",
    target_kind: str = "",
    tokens: bool = False,
    standardize: bool = True,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Source:
    """Arrays x and y, perhaps client, x_test and y_test, in a file of `numpy.savez`; options as in `from_arrays`."""
    options = {key: value for key, value in locals().items() if key not in ("data_dir", "file")}
    path, found = own_path(data_dir, file, "task.file"), dict[str, Any]()
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: cannot be read as .npz of numpy.savez")
    with np.load(path, allow_pickle=False) as archive:
        names = archive.files
        tested = {"x_test", "y_test"} if {"x_test", "y_test"} & set(names) else set()
        for name in ("x", "y", *sorted(tested), *({"client"} & set(names))):
            if name not in names:
                raise DataError(f"{path}: no array {name!r}; the file has {listed(names)}")
            try:
                found[name] = archive[name]
            except Exception as fault:  # of numpy, zipfile and zlib: Python objects, a damaged or a false header
                raise DataError(f"{path}: array {name!r} cannot be read ({one_line(fault)})") from None
    test = (found["x_test"], found["y_test"]) if tested else None
    return from_arrays(found["x"], found["y"], client=found.get("client"), test=test, where=str(path), **options)


def from_arrays(
    x: Any,
    y: Any,
    *,
    client: Any = None,
    test: tuple[Any, Any] | None = None,
    test_client: Any = None,
    target_kind: str = "",
    tokens: bool = False,
    standardize: bool = True,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    where: str = "the arrays",
) -> Source:
    """A dataset from arrays with one row for each example: numpy arrays, torch tensors or lists.

    Args:
        x: inputs; uint8 of three or four dimensions are images, other numbers become float32. Or named arrays, for
            keyword arguments of the model.
        y: targets: integers or texts are classes, floats a regression (standardized), rows of 0 and 1 several labels.
        client: the client of each example, numbers or texts; None for none.
        test: inputs and targets for testing; by default a fraction of the examples.
        test_client: the client of each test example, or None.
        target_kind: classification, multi-label or regression; by default derived from the type of `y`.
        tokens: whether integers in `x` are token ids, which stay integers.
        standardize: whether inputs get mean 0 and standard deviation 1 over the training examples: images by channel,
            rows of numbers by column, other arrays as a whole. Named arrays and token ids stay as they are.
        test_fraction: the fraction of examples that is held out for testing, of each client and of each class.
        split_seed: of another choice of test examples; the seed of a run does not change them.
        where: what error messages call the data.

    >>> source = from_arrays(np.eye(10, 4), np.arange(10) % 2)
    >>> len(source.train), len(source.test), source.classes, source.model
    (8, 2, 2, {'inputs': 4})
    """
    rows, kind = _targets(y, f"{where}: y")
    code = TargetCode.of(rows, tuple(rows.cells), target_kind or kind)
    users = _clients(client, len(rows), f"{where}: client")
    inputs = inputs_of(x, len(rows), f"{where}: x", tokens)
    if test is None:
        labels = code.encode(rows).numpy() if code.kind == "classification" else None
        held = held_out_rows(len(rows), test_fraction, users, labels, split_seed)
        index = [np.flatnonzero(held == part) for part in (False, True)]
        every = Arrays(inputs, torch.arange(len(rows)))
        parts = [(every.gather(torch.from_numpy(one))[0], rows.take(one)) for one in index]
        owners = [None if users is None else users[one] for one in index]
    else:
        other, _ = _targets(test[1], f"{where}: y of the test")
        parts = [(inputs, rows), (inputs_of(test[0], len(other), f"{where}: x of the test", tokens), other)]
        owners = [users, _clients(test_client, len(other), f"{where}: client of the test")]
    code = code.fitted(parts[0][1])
    train, test_set = (examples_of(one, code.encode(target)) for one, target in parts)
    return source_of(train, test_set, code, owners, derived=not target_kind, standardize=standardize)


def source_of(
    train: Examples,
    test: Examples,
    code: TargetCode,
    owners: Sequence[Any],
    *,
    derived: bool,
    standardize: bool = True,
) -> Source:
    """The dataset of examples in memory, with the client of each where there are clients."""
    words = f"{len(train):,} examples for training, {len(test):,} for testing. {code.note(derived)}"
    mean, std = mean_and_std(train.pixels) if isinstance(train, Images) else ((), ())
    scaled = _standardized(train, test) if standardize else None
    words += " Inputs are as given." if scaled is None else f" Inputs are standardized. {POOLED}"
    options = _model_options(_inputs(train), _inputs(test))
    return code.source(*(scaled or (train, test)), owners, note=words, model=options, mean=mean, std=std)


def _array(values: Any, where: str) -> np.ndarray:
    """Values of any kind as an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    try:
        found = np.asarray(values)
    except ValueError:
        raise DataError(f"{where} has rows that differ in length, expected one length") from None
    if found.dtype.kind not in (*_NUMBERS, "U", "O", "T") or found.ndim < 1:
        raise DataError(
            f"{where} is {found.dtype} of shape {found.shape}, expected an array with one row for each example"
        )
    return found


def _targets(values: Any, where: str) -> tuple[Columns, str]:
    """Targets as columns, one for (n,) or (n, 1), otherwise one for each value; and the kind that their type suggests.

    Integers and texts suggest classification, floats regression; for several columns it is "".
    """
    found = _array(values, where)
    if found.ndim > 2 or not found.size:
        raise DataError(
            f"{where} has shape {found.shape}, expected one target, or one row of targets, for each example"
        )
    table = found.reshape(len(found), -1)
    several, kind = table.shape[1] > 1, "regression" if found.dtype.kind == "f" else "classification"
    if found.dtype.kind in _NUMBERS:
        table = table.astype(np.float64)
    elif several or not all(isinstance(one, str) for one in table[:, 0].tolist()):
        holds = type(table[0].tolist()[0]).__name__
        raise DataError(f"{where} holds {holds}, expected numbers, or a text for each example")
    else:
        table = table.astype(object)
    cells = {f"y{i}" if several else "y": column for i, column in enumerate(table.T)}
    return Columns(where, cells, row_numbers=np.arange(len(found)), word="example"), "" if several else kind


def _clients(values: Any, rows: int, where: str) -> np.ndarray | None:
    if values is None:
        return None
    found = _array(values, where)
    if found.shape != (rows,) or found.dtype.kind == "f":
        raise DataError(
            f"{where} is {found.dtype} of shape {found.shape}, expected a number or text for each of {rows} examples"
        )
    return found


def inputs_of(values: Any, rows: int, where: str, tokens: bool) -> Inputs:
    """Inputs as tensors, one row for each example; `where` is for errors, `tokens` as in `from_arrays`."""
    if isinstance(values, Mapping):
        named = {str(name): inputs_of(one, rows, f"{where}[{name!r}]", tokens) for name, one in values.items()}
        if not named or any(isinstance(one, dict) for one in named.values()):
            raise DataError(f"{where} must have one array for each keyword argument of the model")
        return named  # type: ignore[return-value]
    found = _array(values, where)
    if found.dtype.kind not in _NUMBERS:
        raise DataError(f"{where} holds {found.dtype}, expected numbers; texts go through from_table or a tokenizer")
    if len(found) != rows:
        raise DataError(f"{where} has {len(found)} examples, but y has {rows}; give one target for each input")
    if not found.size:
        raise DataError(f"{where} has shape {found.shape}: examples without values")
    if found.ndim == 1:
        found = found[:, None]
    if found.dtype == np.uint8 and found.ndim in (3, 4) and not tokens:  # images, perhaps with channels last or none
        if found.ndim == 3:
            found = found[:, None]
        elif found.shape[1] not in (1, 3) and found.shape[3] in (1, 3):
            found = found.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(found))
    if found.dtype.kind == "f" and len(bad := np.flatnonzero(~np.isfinite(found).reshape(rows, -1).all(1))):
        raise DataError(f"{where}: example {bad[0]} has a value that is not finite; replace or leave it out")
    kept = tokens and found.dtype.kind in "iu"
    return torch.from_numpy(np.ascontiguousarray(found, np.int64 if kept else np.float32))


def examples_of(inputs: Inputs, targets: Tensor) -> Examples:
    """Images where inputs are bytes, otherwise arrays."""
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        return Images(inputs, targets)
    return Arrays(inputs, targets)


def _inputs(examples: Examples) -> Tensor | None:
    """The stored inputs; None for named ones."""
    stored: Any = examples.pixels if isinstance(examples, Images) else getattr(examples, "inputs", None)
    return stored if isinstance(stored, Tensor) else None


def _standardized(train: Examples, test: Examples) -> tuple[Examples, Examples] | None:
    """Both with mean 0 and standard deviation 1 over the training examples; None for inputs that are no numbers."""
    if (values := image_values(train)) is not None:
        scale = mean_and_std(values)
        return standardized(train, *scale), standardized(test, *scale)
    first, second = _inputs(train), _inputs(test)
    if first is None or second is None or not first.is_floating_point():
        return None
    wide = first.double()
    middle, spread = (wide.mean(0), wide.std(0, correction=0)) if first.dim() == 2 else (wide.mean(), wide.std())
    spread = torch.where(spread > 0, spread, 1.0)
    scaled = [((one.double() - middle) / spread).float() for one in (first, second)]
    return Arrays(scaled[0], train.targets), Arrays(scaled[1], test.targets)


def _model_options(inputs: Tensor | None, others: Tensor | None) -> dict[str, int]:
    """What models need to know about the inputs."""
    if inputs is None or others is None:
        return {}
    if inputs.dim() == 4 and (inputs.dtype == torch.uint8 or inputs.is_floating_point()):
        return image_options(inputs)
    if inputs.is_floating_point():
        return {"inputs": inputs[0].numel()}
    vocabulary = 1 + max(int(inputs.max()), int(others.max()))
    return {"length": inputs.shape[1], "vocab": vocabulary} if inputs.dim() == 2 else {}
