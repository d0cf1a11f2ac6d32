"""Arrays of your own: numpy arrays or torch tensors in Python, a file of `numpy.savez` on the command line.

np.savez("data.npz", x=inputs, y=targets, client=client_of_each_example)
thinwire run fedavg --on arrays --set task.file=data.npz
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.text import human_bytes
from thinwire.data.columns import Columns, listed, objects
from thinwire.data.examples import Source, image_values, mean_and_std, standardized
from thinwire.data.files import one_line, own_path
from thinwire.data.images import image_options
from thinwire.data.partition import held_out_rows
from thinwire.data.table import POOLED, TargetCode
from thinwire.errors import DataError

_NUMBERS = "biuf"


@register(
    "dataset", "arrays", doc="Arrays x and y of your own in an .npz file, perhaps client, x_test and y_test: task.file."
)
def arrays(
    data_dir: Path | None = None,
    file: str = "",
    target_kind: str = "",
    standardize: bool = True,
    test_fraction: float = 0.2,
) -> Source:
    """Arrays x and y, perhaps client, x_test and y_test, in a file of `numpy.savez`; options as in `from_arrays`."""
    options = {key: value for key, value in locals().items() if key not in ("data_dir", "file")}
    path, found = own_path(data_dir, file, "task.file"), dict[str, Any]()
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: cannot be read as .npz of numpy.savez")
    if (needed := needed_memory(path)) > (limit := memory_of_machine()):
        raise DataError(
            f"{path} needs {human_bytes(needed)} of memory, expected at most the {human_bytes(limit)} of this machine; "
            "write fewer examples, or uint8 images"
        )
    with np.load(path, allow_pickle=False) as archive:
        names = archive.files
        tested = [name for name in ("x_test", "y_test") if {"x_test", "y_test"} & set(names)]
        for name in ("x", "y", *tested, *({"client"} & set(names))):
            if name not in names:
                raise DataError(f"{path}: no array {name!r}; the file has {listed(names)}")
            try:
                found[name] = archive[name]
            except Exception as fault:  # of numpy, zipfile and zlib: Python objects, a damaged or a false header
                raise DataError(f"{path}: array {name!r} cannot be read ({one_line(fault)})") from None
    test = (found["x_test"], found["y_test"]) if tested else None
    source = from_arrays(found["x"], found["y"], client=found.get("client"), test=test, where=str(path), **options)
    return replace(source, note=f"{source.note} Reading the file takes {human_bytes(needed)} of memory.")


def needed_memory(path: Path) -> int:
    """The bytes that the arrays of an .npz need while they are read, by its headers: a few bytes may unpack to many.

    An array is there as stored, and as float32, int64 or bytes. A false header counts nothing: reading refuses it.
    """
    needed = 0
    with zipfile.ZipFile(path) as archive:
        for one in archive.infolist():
            with archive.open(one) as file, suppress(ValueError, zlib.error, zipfile.BadZipFile, EOFError):
                read = {(1, 0): np.lib.format.read_array_header_1_0}.get(np.lib.format.read_magic(file))
                shape, _, dtype = (read or np.lib.format.read_array_header_2_0)(file)
                values, images = math.prod(shape), dtype == np.uint8 and len(shape) in (3, 4)
                if values * dtype.itemsize <= one.file_size:
                    needed += values * (dtype.itemsize + (1 if images else 4 if len(shape) > 1 else 8))
    return needed


def memory_of_machine() -> float:
    """The memory of this machine in bytes; infinite where the system does not tell, as Windows."""
    with suppress(AttributeError, ValueError, OSError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return math.inf


def from_arrays(
    x: Any,
    y: Any,
    *,
    client: Any = None,
    test: tuple[Any, Any] | None = None,
    target_kind: str = "",
    standardize: bool = True,
    test_fraction: float = 0.2,
    where: str = "the arrays",
) -> Source:
    """A dataset from arrays with one row for each example: numpy arrays, torch tensors or lists.

    Args:
        x: inputs; uint8 of three or four dimensions are images, other numbers become float32.
        y: targets: integers or texts are classes, floats a regression (standardized), rows of 0 and 1 several labels.
        client: the client of each example, numbers or texts; None for none.
        test: inputs and targets for testing; by default a fraction of the examples.
        target_kind: classification, multi-label or regression; by default derived from the type of `y`.
        standardize: whether inputs get mean 0 and standard deviation 1 over the training examples: images by channel,
            rows of numbers by column, other arrays as a whole.
        test_fraction: the fraction of examples that is held out for testing, of each client and of each class; the seed
            of a run does not change them.
        where: what error messages call the data.

    >>> source = from_arrays(np.eye(10, 4), np.arange(10) % 2)
    >>> len(source.train), len(source.test), source.classes, source.model
    (8, 2, 2, {'inputs': 4})
    """
    rows, kind = _targets(y, f"{where}: y")
    code = replace(TargetCode.of(rows, tuple(rows.cells), target_kind or kind), derived=not target_kind)
    users = None if client is None else _clients(client, len(rows), f"{where}: client")
    if users is not None:
        rows = replace(rows, cells={**rows.cells, "client": objects(map(str, users))})
    inputs = inputs_of(x, len(rows), f"{where}: x")
    if test is None:
        labels = code.encode(rows).numpy() if code.kind == "classification" else None
        held = held_out_rows(len(rows), test_fraction, users, labels)
        parts = [rows.take(np.flatnonzero(held == part)) for part in (False, True)]
        taken = [inputs[torch.from_numpy(part.rows)] for part in parts]
    else:
        other, _ = _targets(test[1], f"{where}: y of the test")
        parts, taken = [rows, other], [inputs, inputs_of(test[0], len(other), f"{where}: x of the test")]
    own = "client" if users is not None else ""
    return source_of(code, parts, taken, own, standardize)


def source_of(
    code: TargetCode,
    parts: Sequence[Columns],
    inputs: Sequence[Tensor],
    client: str = "",
    standardize: bool = True,
) -> Source:
    """The dataset of training and test inputs.

    Args:
        code: how targets are encoded.
        parts: rows with targets and clients.
        inputs: their inputs.
        client: the column of clients, "" for none.
        standardize: as in `from_arrays`.
    """
    code = code.fitted(parts[0])
    x, scale = inputs[0], {}
    if x.dtype == torch.int64:  # token ids
        model, standardize = {"length": x.shape[1], "vocab": 1 + max(int(one.max()) for one in inputs)}, False
    else:
        model = image_options(x) if x.dim() == 4 else {"inputs": x[0].numel()}
    if x.dtype == torch.uint8:
        scale = dict(zip(("mean", "std"), mean_and_std(x), strict=True))
    source = code.source(parts, inputs, client, model=model, **scale)
    note = f"{len(parts[0]):,} examples for training, {len(parts[1]):,} for testing. {code.note()}"
    how = f"Inputs are standardized. {POOLED}" if standardize else "Inputs are as given."
    return replace(_standardized(source) if standardize else source, note=f"{note} {how}")


def _standardized(source: Source) -> Source:
    """Inputs with mean 0 and standard deviation 1 over the training examples."""
    if (images := image_values(source.train)) is not None:
        scale = mean_and_std(images)
        return replace(source, train=standardized(source.train, *scale), test=standardized(source.test, *scale))
    parts: Any = (source.train, source.test)
    wide = parts[0].inputs.double()
    middle, spread = (wide.mean(0), wide.std(0, correction=0)) if wide.dim() == 2 else (wide.mean(), wide.std())
    spread = torch.where(spread > 0, spread, 1.0)
    train, test = (replace(part, inputs=((part.inputs.double() - middle) / spread).float()) for part in parts)
    return replace(source, train=train, test=test)


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
            f"{where} has shape {found.shape}, expected one target, or one row of targets, for each example; "
            "labels of pixels go to tw.simulate(model, [(x, y), ...])"
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


def _clients(values: Any, rows: int, where: str) -> np.ndarray:
    found = _array(values, where)
    if found.shape != (rows,) or found.dtype.kind == "f":
        raise DataError(
            f"{where} is {found.dtype} of shape {found.shape}, expected a number or text for each of {rows} examples"
        )
    return found


def inputs_of(values: Any, rows: int, where: str, tokens: bool = False) -> Tensor:
    """Inputs with one row for each example: images as bytes, other numbers as float32.

    Args:
        values: the inputs.
        rows: number of examples.
        where: what they are called in messages of errors.
        tokens: whether rows of integers are token ids, which stay integers.
    """
    found = _array(values, where)
    if found.dtype.kind not in _NUMBERS:
        raise DataError(f"{where} holds {found.dtype}, expected numbers; texts go through from_table or a tokenizer")
    if len(found) != rows:
        raise DataError(f"{where} has {len(found)} examples, but y has {rows}; give one target for each input")
    if not found.size:
        raise DataError(f"{where} has shape {found.shape}: examples without values")
    if found.ndim == 1:
        found = found[:, None]
    if found.dtype == np.uint8 and found.ndim in (3, 4):  # images, perhaps with channels last or none
        if found.ndim == 3:
            found = found[:, None]
        elif found.shape[1] not in (1, 3) and found.shape[3] in (1, 3):
            found = found.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(found))
    if found.dtype.kind == "f" and len(bad := np.flatnonzero(~np.isfinite(found).reshape(rows, -1).all(1))):
        raise DataError(f"{where}: example {bad[0]} has a value that is not finite; replace or leave it out")
    kept = tokens and found.dtype.kind in "iu" and found.ndim == 2
    return torch.from_numpy(np.ascontiguousarray(found, np.int64 if kept else np.float32))
