"""Arrays of your own: numpy arrays or torch tensors in Python, a file of `numpy.savez` on the command line.

np.savez("data.npz", x=inputs, y=targets, client=client_of_each_example)
thinwire run fedavg --on arrays --set task.file=data.npz
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.data.columns import Columns
from thinwire.data.datasets.image_folder import image_options
from thinwire.data.examples import Arrays, Examples, Images, Inputs, Source
from thinwire.data.folder import own_path
from thinwire.data.hold_out import held_out_rows
from thinwire.data.npz_files import names_in, read_array
from thinwire.data.reading import numbered
from thinwire.data.scaling import image_values, standardized, sums_of
from thinwire.data.targets import POOLED, TargetCode
from thinwire.errors import ConfigError, DataError

_NUMBERS = "biuf"


@register(
    "dataset", "arrays", doc="Arrays x and y of your own in an .npz file, perhaps client, x_test and y_test: task.file."
)
def arrays(
    data_dir: Path | None = None,
    file: str = "",
    x: str = "x",
    y: str = "y",
    client: str = "client",
    x_test: str = "x_test",
    y_test: str = "y_test",
    target_kind: str = "",
    tokens: bool = False,
    standardize: bool = True,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Source:
    """Arrays in a file of `numpy.savez`; five options name the arrays, of which `x` and `y` are required."""
    path = own_path(data_dir, file, "task.file")
    known = names_in(path)
    test = None
    if x_test in known or y_test in known:
        test = (read_array(path, x_test, "task.x_test"), read_array(path, y_test, "task.y_test"))
    return from_arrays(
        read_array(path, x, "task.x"),
        read_array(path, y, "task.y"),
        client=read_array(path, client, "task.client") if client in known or client != "client" else None,
        test=test,
        target_kind=target_kind,
        tokens=tokens,
        standardize=standardize,
        test_fraction=test_fraction,
        split_seed=split_seed,
        where=str(path),
    )


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
    rows = _targets(y, f"{where}: y")
    code = TargetCode.of(rows, tuple(rows.cells), target_kind or _kind(y, rows))
    users = _clients(client, len(rows), f"{where}: client")
    inputs = _inputs(x, len(rows), f"{where}: x", tokens)
    if test is None:
        labels = code.encode(rows).numpy() if code.kind == "classification" else None
        ids = None if users is None else np.unique(users, return_inverse=True)[1]
        held = held_out_rows(len(rows), test_fraction, ids, labels, split_seed)
        index = [np.flatnonzero(~held), np.flatnonzero(held)]
        parts = [(_take(inputs, one), rows.take(one)) for one in index]
        owners = [None if users is None else users[one] for one in index]
    else:
        other = _targets(test[1], f"{where}: y of the test")
        parts = [(inputs, rows), (_inputs(test[0], len(other), f"{where}: x of the test", tokens), other)]
        owners = [users, _clients(test_client, len(other), f"{where}: client of the test")]
    code = code.fitted(parts[0][1])
    train, test_set = (_examples(one, code.encode(target)) for one, target in parts)
    return source_of(train, test_set, code, owners, derived=not target_kind, standardize=standardize)


def source_of(
    train: Examples,
    test: Examples,
    code: TargetCode,
    owners: list[np.ndarray | None],
    *,
    derived: bool,
    standardize: bool = True,
) -> Source:
    """The dataset of examples in memory, with the client of each where there are clients."""
    names = numbered(str(one) for part in owners if part is not None for one in part.tolist())
    position = {name: i for i, name in enumerate(names)}
    users = [None if part is None else torch.tensor([position[str(one)] for one in part.tolist()]) for part in owners]
    options = _model_options(train, test)
    words = f"{len(train):,} examples for training, {len(test):,} for testing. {code.note(derived)}"
    mean, std = sums_of(train.pixels).mean_and_std() if isinstance(train, Images) else ((), ())
    scaled = _standardized(train, test) if standardize else None
    if scaled is not None:
        train, test = scaled
    words += " Inputs are as given." if scaled is None else f" Inputs are standardized. {POOLED}"
    return Source(
        train,
        test,
        code.outputs,
        users[0],
        users[1],
        note=words,
        model=options,
        mean=mean,
        std=std,
        loss=code.loss,
        metrics=code.metrics,
        class_names=code.names,
        user_names=names,
    )


def _array(values: Any, where: str) -> np.ndarray:
    """Values of any kind as an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    try:
        found = np.asarray(values)
    except ValueError:
        found = np.empty(0, object)
    if found.dtype.kind not in (*_NUMBERS, "U", "O", "T") or found.ndim < 1:
        raise DataError(
            f"{where} is {found.dtype} of shape {found.shape}, expected an array with one row for each example"
        )
    return found


def _targets(values: Any, where: str) -> Columns:
    """Targets as columns: one for (n,) or (n, 1), otherwise one for each value of an example."""
    found = _array(values, where)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim > 2 or not len(found) or (found.ndim == 2 and not found.shape[1]):
        raise DataError(
            f"{where} has shape {found.shape}, expected one target, or one row of targets, for each example"
        )
    if found.dtype.kind in "OUT":
        if found.ndim > 1 or not all(isinstance(one, str) for one in found.tolist()):
            raise DataError(
                f"{where} holds {type(found.reshape(-1)[0]).__name__}, expected numbers, or a text for each example"
            )
        return Columns(where, {"y": found.tolist()}, row_numbers=np.arange(len(found)), word="example")
    columns = {"y": found} if found.ndim == 1 else {f"y{i}": found[:, i] for i in range(found.shape[1])}
    cells = {name: one.astype(np.float64) for name, one in columns.items()}
    return Columns(where, cells, row_numbers=np.arange(len(found)), word="example")


def _kind(values: Any, rows: Columns) -> str:
    """Classification for integers and texts, regression for floats; several columns are derived from their values."""
    if len(rows.cells) > 1:
        return ""
    return "regression" if _array(values, rows.where).dtype.kind == "f" else "classification"


def _clients(values: Any, rows: int, where: str) -> np.ndarray | None:
    if values is None:
        return None
    found = _array(values, where)
    if found.shape != (rows,) or found.dtype.kind == "f":
        raise DataError(
            f"{where} is {found.dtype} of shape {found.shape}, expected a number or text for each of {rows} examples"
        )
    return found


def _inputs(values: Any, rows: int, where: str, tokens: bool) -> Inputs:
    """Inputs as tensors, one row for each example."""
    if isinstance(values, Mapping):
        named = {str(name): _inputs(one, rows, f"{where}[{name!r}]", tokens) for name, one in values.items()}
        if not named or any(isinstance(one, dict) for one in named.values()):
            raise DataError(f"{where} must have one array for each keyword argument of the model")
        return named  # type: ignore[return-value]
    found = _array(values, where)
    if found.dtype.kind not in _NUMBERS:
        raise DataError(f"{where} holds {found.dtype}, expected numbers; texts go through from_table or a tokenizer")
    if len(found) != rows:
        raise DataError(f"{where} has {len(found)} examples, but y has {rows}; give one target for each input")
    if found.ndim == 1:
        found = found[:, None]
    if found.dtype == np.uint8 and found.ndim in (3, 4) and not tokens:
        return torch.from_numpy(np.ascontiguousarray(_channels_first(found, where)))
    if found.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(found).reshape(rows, -1).all(1))
        if len(bad):
            raise DataError(f"{where}: example {bad[0]} has a value that is not finite; replace or leave it out")
    kept = tokens and found.dtype.kind in "iu"
    return torch.from_numpy(np.ascontiguousarray(found, np.int64 if kept else np.float32))


def _channels_first(pixels: np.ndarray, where: str) -> np.ndarray:
    """(n, channels, height, width) of images that may lack channels or have them last."""
    if pixels.ndim == 3:
        return pixels[:, None]
    if pixels.shape[1] not in (1, 3) and pixels.shape[3] in (1, 3):
        return pixels.transpose(0, 3, 1, 2)
    if not pixels.size:
        raise ConfigError(f"{where} has shape {pixels.shape}: images without pixels")
    return pixels


def _take(inputs: Inputs, index: np.ndarray) -> Inputs:
    rows = torch.from_numpy(index)
    return {name: one[rows] for name, one in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def _examples(inputs: Inputs, targets: Tensor) -> Examples:
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        return Images(inputs, targets)
    return Arrays(inputs, targets)


def _standardized(train: Examples, test: Examples) -> tuple[Examples, Examples] | None:
    """Both with mean 0 and standard deviation 1 over the training examples; None for inputs that are no numbers."""
    if (values := image_values(train)) is not None:
        mean, std = sums_of(values).mean_and_std()
        return standardized(train, mean, std), standardized(test, mean, std)
    inputs = [one.inputs if isinstance(one, Arrays) else {} for one in (train, test)]
    first, second = inputs
    if isinstance(first, dict) or isinstance(second, dict) or not first.is_floating_point():
        return None
    wide = first.double()
    middle, spread = (wide.mean(0), wide.std(0, correction=0)) if first.dim() == 2 else (wide.mean(), wide.std())
    spread = torch.where(spread > 0, spread, 1.0)
    scaled = [((one.double() - middle) / spread).float() for one in (first, second)]
    return Arrays(scaled[0], train.targets), Arrays(scaled[1], test.targets)


def _model_options(train: Examples, test: Examples) -> dict[str, int]:
    """What models need to know about the inputs."""
    if isinstance(train, Images):
        return image_options(train.pixels)
    inputs, others = (one.inputs if isinstance(one, Arrays) else {} for one in (train, test))
    if isinstance(inputs, dict) or isinstance(others, dict):
        return {}
    if not inputs.is_floating_point():
        vocabulary = 1 + max(int(inputs.max()), int(others.max()))
        return {"length": inputs.shape[1], "vocab": vocabulary} if inputs.dim() == 2 else {}
    return image_options(inputs) if inputs.dim() == 4 else {"inputs": inputs[0].numel()}
