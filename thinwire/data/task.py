"""A task: a model, a dataset and its partition into clients, a loss.

>>> from thinwire.data.named_images import digits
>>> task = make_task(digits(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), clients=5)
>>> len(task.clients), len(task.train), len(task.test)
(5, 1438, 359)
>>> make_task(digits(), "mlp", partition="dirichlet", clients=3).model.head.out_features
10
>>> pool, clients = pool_clients([(torch.zeros(3, 2), torch.zeros(3)), (torch.ones(1, 2), torch.ones(1))])
>>> len(pool), clients.sizes().tolist()
(4, [3, 1])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from thinwire.core.key import Key, permutations
from thinwire.core.registry import lookup
from thinwire.core.text import visible
from thinwire.data.examples import Arrays, Examples, Inputs, Source, image_values, named, standardized
from thinwire.data.losses import Loss, bce, cross_entropy, loss_by_name
from thinwire.data.partition import Assignment, Feature, Partition, offsets_of
from thinwire.errors import ConfigError
from thinwire.metrics import metrics_by_name
from thinwire.metrics.base import Metric
from thinwire.metrics.classification import IGNORED
from thinwire.models.exact_init import seeded

MAX_EXAMPLES = 100_000_000  # of one client: an iterable without an end is refused
_SHUFFLED_CLIENTS = 1 << 14  # clients whose examples are shuffled in one call
_COLLATED_ITEMS = 1 << 12  # items of a dataset that are collated in one call

Model = nn.Module | Callable[..., nn.Module] | str


@dataclass(frozen=True, eq=False)
class Task:
    """A model, its training data by client, its test data and its loss.

    Args:
        model: the module with its initial weights; never changed.
        train: the examples of all clients.
        clients: the training examples of each client.
        test: examples for evaluation after a round, or None.
        client_tests: the examples of `train` that are held out to evaluate each client's model; or None.
        loss: `loss(outputs, targets)`, one value per example or their mean; see `thinwire.data.losses`.
        note: a remark about the data for readers of results.
        metrics: metrics of the test set besides loss and accuracy, by name.
        objective: what rounds and runs are ranked by: `accuracy`, `loss` or one of the metrics; by default accuracy if
            targets are class labels (`metrics/objective.py`).
        class_names: names of classes or labels for readers, by number; empty if they have none.
        client_names: names of clients for readers, by number; empty if they have none.
        blank: whether this machine has no data, and the examples are placeholders.
    """

    model: nn.Module
    train: Examples
    clients: Assignment
    test: Examples | None = None
    client_tests: Assignment | None = None
    loss: Loss = cross_entropy
    note: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    objective: str = ""
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    blank: bool = False

    def __post_init__(self) -> None:
        empty = np.flatnonzero(self.clients.sizes() == 0)
        if len(empty):
            more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
            raise ConfigError(f"client {empty[0]}{more} has no examples; leave empty clients out, or use fewer clients")


# -- a task from a dataset -------------------------------------------------------------------------------------------


def make_task(
    source: Source,
    model: Model,
    *,
    partition: str | Partition = "iid",
    clients: int = 10,
    seed: int = 0,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    validation_fraction: float = 0.0,
    scale: Literal["unit", "standard"] = "unit",
) -> Task:
    """A task: the examples of a dataset, divided into clients, and a model with its initial weights.

    Args:
        source: the dataset, for example from `tw.data.from_table`.
        model: a module, which is used as it is; a function that makes one, called with those of its parameters that
            the dataset states (`classes`, and for example `inputs` or `channels`); or the name of a registered model.
        partition: the name of a partition (`thinwire list partitions`) or a `Partition`; `natural` makes one client of
            each user.
        clients: number of clients; 0 with `natural` or `auto` for all users.
        seed: of the partition, of the initial weights of a model that is made here, and of the validation examples.
        loss: the loss, or its name; by default that of the dataset.
        metrics: metrics besides loss and accuracy, by name; by default those of the dataset.
        validation_fraction: fraction of each client's examples that is held out to evaluate the client's model.
        scale: of images: `unit` for values from 0 to 1, `standard` for mean 0 and standard deviation 1.
    """
    key = Key(seed)
    rule = lookup("partition", partition).make() if isinstance(partition, str) else partition
    assignment = assign_clients(source, rule, clients, key)
    if not isinstance(model, nn.Module):
        make = lookup("model", model).make if isinstance(model, str) else model
        if not callable(make):
            raise ConfigError(
                f"model must be a module, a function that makes one, or a name, not {type(model).__name__}"
            )
        with seeded(key.fold("model")):
            model = make_module(make, {**source.model, "classes": source.classes})
    changes = {name: one for name, one in (("loss", loss), ("metrics", metrics)) if one is not None}
    source = replace(scaled(source, scale, "the dataset"), **changes)  # type: ignore[arg-type]
    return task_of(source, model, assignment, validation_fraction, key)


def task_of(source: Source, model: nn.Module, clients: Assignment, fraction: float, key: Key) -> Task:
    """The task of a dataset, a model and the examples of each client.

    Args:
        source: the dataset.
        model: the module with its initial weights.
        clients: the training examples of each client.
        fraction: of each client's examples that is held out to evaluate its model; 0 for none.
        key: the root of all randomness, the key of the seed.
    """
    names, validation = client_names(source, clients), None
    if fraction:
        clients, validation = validation_fraction(clients, fraction, key.fold("hold-out"))
    loss: Any = source.loss
    metrics: Any = source.metrics
    return Task(
        model,
        source.train,
        clients,
        source.test,
        validation,
        loss_by_name(loss) if isinstance(loss, str) else loss,
        source.note,
        metrics if isinstance(metrics, Mapping) else metrics_by_name(metrics),
        source.objective,
        source.class_names,
        names,
    )


def scaled(source: Source, scale: str, label: str) -> Source:
    """The dataset with its images as they are stored (`unit`), or standardized by its constants (`standard`)."""
    if scale == "unit":
        return source
    if scale != "standard":
        raise ConfigError(f"scale is 'unit' or 'standard', not {scale!r}")
    values = image_values(source.train)
    if values is None or image_values(source.test) is None:
        raise ConfigError(f"{label} has no images; write task.scale = 'unit'")
    if not len(source.mean) == len(source.std) == values.shape[1]:
        raise ConfigError(
            f"task.scale = 'standard' needs {values.shape[1]} values of mean and std from the dataset, and {label} "
            f"states {len(source.mean)} and {len(source.std)}; write task.scale = 'unit'"
        )
    train, test = (standardized(part, source.mean, source.std) for part in (source.train, source.test))
    return replace(source, train=train, test=test)


def assign_clients(source: Source, partition: Partition, clients: int, key: Key) -> Assignment:
    """The training examples of each client; of several targets, the first one counts as the label."""
    labels = source.train.targets if source.train.groups is None else source.train.groups
    if labels.dim() != 1:
        labels = labels.reshape(len(labels), -1)[:, 0]
    users = None if source.users is None else source.users.numpy()
    more: Any = {"inputs": lambda at: _values(source.train, at)} if isinstance(partition, Feature) else {}
    return partition.assign(labels.numpy(), clients, key.fold("split"), users, **more)


def _values(examples: Examples, at: np.ndarray) -> np.ndarray:
    """The inputs of some examples as rows of numbers, for partitions."""
    inputs, _ = examples.gather(torch.as_tensor(at))
    return torch.cat([x.double().flatten(1) for x in tree_leaves(inputs)], 1).numpy()


def client_names(source: Source, clients: Assignment) -> tuple[str, ...]:
    """The name of each client where all its examples are of one user with a name; empty if one has none."""
    if source.users is None or not source.user_names or not clients.sizes().all():
        return ()
    users = source.users.numpy()[clients.order]
    first = users[clients.offsets[:-1]]
    if not np.array_equal(users, np.repeat(first, clients.sizes())):
        return ()
    return tuple(source.user_names[user] for user in first.tolist())


def make_module(make: Callable[..., Any], stated: Mapping[str, Any]) -> nn.Module:
    """The module that a function makes, called with those of its parameters that the data states."""
    known = inspect.signature(make).parameters
    made = make(**{name: value for name, value in stated.items() if name in known})
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the function of the model returned {type(made).__name__}, expected a torch nn.Module")
    return made


def validation_fraction(clients: Assignment, fraction: float, key: Key) -> tuple[Assignment, Assignment]:
    """Hold out a random fraction of each client's examples for validation: (training, validation) assignments.

    >>> train, held_out = validation_fraction(Assignment(np.arange(10), np.array([0, 5, 10])), 0.2, Key(0))
    >>> train.sizes().tolist(), held_out.sizes().tolist()
    ([4, 4], [1, 1])
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the validation fraction must be between 0 and 1, not {fraction}")
    sizes = clients.sizes()
    counts = np.rint(fraction * sizes).astype(np.int64)
    wrong = np.flatnonzero((counts < 1) | (counts >= sizes))
    if len(wrong):
        i = int(wrong[0])
        raise ConfigError(f"client {i} has {sizes[i]} examples, too few to hold out a fraction of {fraction}")
    within = np.empty_like(clients.order)
    for first in range(0, len(clients), _SHUFFLED_CLIENTS):
        ids = range(first, min(first + _SHUFFLED_CLIENTS, len(clients)))
        shuffled = permutations([key.fold(i) for i in ids], sizes[first : ids.stop].tolist())
        within[clients.offsets[first] : clients.offsets[ids.stop]] = np.concatenate(shuffled)
    starts = np.repeat(clients.offsets[:-1], sizes)
    order = clients.order[within + starts]
    held_out = np.arange(len(order)) - starts < np.repeat(counts, sizes)
    return Assignment(order[~held_out], offsets_of(sizes - counts)), Assignment(order[held_out], offsets_of(counts))


# -- the examples of clients -----------------------------------------------------------------------------------------


def pool_clients(clients: Sequence[Any]) -> tuple[Arrays, Assignment]:
    """Concatenate the examples of clients, each a pair `(inputs, targets)`, a torch Dataset or a DataLoader.

    Args:
        clients: pairs of tensors or numpy arrays with one row per example (inputs may also be a tuple or a dictionary
            of these), datasets whose items are such pairs of one example, or DataLoaders, which are read once.
    """
    if not len(clients):
        raise ConfigError("there are no clients; give at least one pair (inputs, targets)")
    pairs = [as_tensors(client, f"client {i}") for i, client in enumerate(clients)]
    shapes = [_shapes(*pair) for pair in pairs]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ConfigError(f"client {i} has {shape}, client 0 {shapes[0]}; all examples need one shape")
    pool = Arrays(*_joined(pairs))
    return pool, Assignment(np.arange(len(pool)), offsets_of(np.array([len(targets) for _, targets in pairs])))


def as_examples(data: Any) -> Arrays:
    """Examples from a pair `(inputs, targets)`, a torch Dataset or a DataLoader."""
    return Arrays(*as_tensors(data, "test"))


def as_tensors(data: Any, what: str) -> tuple[Inputs, Tensor]:
    """Inputs and targets with one row for each example.

    Args:
        data: a pair `(inputs, targets)` of tensors or numpy arrays, where inputs may also be a tuple or a dictionary
            of these (`arguments` says how the model is called); a torch Dataset whose items are such pairs of one
            example; or a DataLoader, which is read once.
        what: whose examples these are, for error messages.

    >>> inputs, targets = as_tensors((np.zeros((3, 2)), np.array([0, 1, 0])), "client 0")
    >>> inputs.dtype, targets.dtype, inputs.shape
    (torch.float32, torch.int64, torch.Size([3, 2]))
    """
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray):
        inputs, targets = data
    elif isinstance(data, str | bytes | Mapping) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise ConfigError(
            f"{what} must be a pair (inputs, targets) of tensors or numpy arrays, a torch Dataset or a DataLoader, not "
            f"{type(data).__name__}"
        )
    else:
        inputs, targets = _read(data, what)
    inputs, targets = _inputs(inputs, what), _tensor(targets, f"{what}: targets")
    rows = {len(block) for block in tree_leaves(inputs)}
    if rows != {len(targets)}:
        raise ConfigError(
            f"{what} has {sorted(rows)} inputs but {len(targets)} targets; give one target for each input"
        )
    if not len(targets):
        raise ConfigError(f"{what} has no examples; leave empty clients out")
    return inputs, targets


def _read(data: Any, what: str) -> tuple[Any, Tensor]:
    """All examples of a Dataset or a DataLoader, one after another."""
    from torch.utils.data import DataLoader  # imported late: multiprocessing

    if getattr(data, "drop_last", False):
        raise ConfigError(
            f"{what}: this DataLoader leaves out the last examples; write DataLoader(..., drop_last=False)"
        )
    if isinstance(data, DataLoader) and data.batch_sampler is None:
        data = data.dataset  # of single examples
    pairs, count = list[tuple[Any, Tensor]](), 0
    try:
        if not isinstance(data, DataLoader):  # with a generator of its own, because a DataLoader draws from it
            data = DataLoader(data, _COLLATED_ITEMS, generator=torch.Generator())
        for inputs, targets in data:
            pairs.append((_inputs(inputs, what), targets))
            count += len(targets)
            if count > MAX_EXAMPLES:
                raise ValueError(f"more than {MAX_EXAMPLES:,} examples; it must have an end")
        return _joined(pairs) if pairs else (torch.empty(0), torch.empty(0))
    except Exception as error:
        raise ConfigError(
            f"{what}: the items must be pairs (inputs, targets) of one shape, of several inputs ((a, b), targets): "
            f"{visible(str(error), 300)}"
        ) from error


def _inputs(values: Any, what: str) -> Inputs:
    """Inputs of any kind as a tensor, a tuple of tensors or a dictionary of tensors."""
    if isinstance(values, Mapping):
        return {str(name): _tensor(one, f"{what}: inputs {name!r}") for name, one in values.items()}
    if isinstance(values, tuple | list):
        return tuple(_tensor(one, f"{what}: inputs {i}") for i, one in enumerate(values))
    return _tensor(values, f"{what}: inputs")


def _joined(pairs: Sequence[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    """Inputs and targets of several pairs as one."""
    return tree_map(lambda *parts: torch.cat(parts), *pairs)


def _shapes(inputs: Inputs, targets: Tensor) -> str:
    """The shape of one example, in words."""
    parts = {**named(inputs, "inputs"), "targets": targets}
    return ", ".join(f"{name} of shape {list(one.shape[1:])}" for name, one in parts.items())


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


# -- description of a partition ----------------------------------------------------------------------------------------

BINS = 10


@dataclass(frozen=True, eq=False)
class PartitionDescription:
    """The examples of each client, by class, and how unequal clients are.

        label skew   mean over clients of  1/2 sum over classes |p_client - p_all|   (total variation distance)
        size skew    Gini coefficient of the numbers of examples

    Both are 0 if all clients are alike, and approach 1 the more they differ. Of few examples, even a random choice has
    a label skew above 0. The targets of a regression are counted in ten bins with equally many examples.

    Args:
        kind: what the targets are: `classes`, `labels` (several for each example) or `numbers` (a regression).
        sizes: (clients,) training examples of each client.
        counts: (clients, classes) examples of each class; for labels, examples that have it; for numbers, in each bin.
        class_names: of the columns of `counts`.
        client_names: of the rows.
        unused: training examples of no client.
    """

    kind: Literal["classes", "labels", "numbers"]
    sizes: np.ndarray
    counts: np.ndarray
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]
    unused: int = 0

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def label_skew(self) -> float:
        """Mean total variation distance between the classes of a client and those of all clients."""
        return float(self.distances.mean())

    @property
    def distances(self) -> np.ndarray:
        """(clients,) total variation distance of each client, from 0 to 1."""
        total = np.maximum(self.counts.sum(1, keepdims=True), 1)
        everyone = self.counts.sum(0) / max(int(self.counts.sum()), 1)
        return np.asarray(np.abs(self.counts / total - everyone).sum(1) / 2)

    @property
    def size_skew(self) -> float:
        """Gini coefficient of the numbers of examples.

        sum over i of (2 i - n - 1) size_i / (n sum of sizes),   sizes in ascending order, i from 1 to n
        """
        sizes, n = np.sort(self.sizes), len(self.sizes)
        return float(((2 * np.arange(1, n + 1) - n - 1) * sizes).sum() / (n * sizes.sum()))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each client, for tables and JSON."""
        return [
            {
                "client": name,
                "examples": int(self.sizes[i]),
                "classes": {name: int(n) for name, n in zip(self.class_names, self.counts[i], strict=True) if n},
                "label_skew": round(distance, 6),
            }
            for i, (name, distance) in enumerate(zip(self.client_names, self.distances.tolist(), strict=True))
        ]

    def summary(self) -> dict[str, Any]:
        """The numbers of the whole partition."""
        sizes = {"min": int(self.sizes.min()), "median": float(np.median(self.sizes)), "max": int(self.sizes.max())}
        return {
            "clients": len(self),
            "examples": int(self.sizes.sum()),
            "unused_examples": self.unused,
            "examples_per_client": sizes,
            **({"classes": len(self.class_names)} if self.kind != "numbers" else {}),
            "label_skew": round(self.label_skew, 6),
            "size_skew": round(self.size_skew, 6),
        }

    def __repr__(self) -> str:
        low, high = int(self.sizes.min()), int(self.sizes.max())
        return (
            f"{len(self)} clients with {low:,} to {high:,} examples, label skew {self.label_skew:.3f}, "
            f"size skew {self.size_skew:.3f}"
        )


def describe_partition(task: Task) -> PartitionDescription:
    """The partition of a task; reads the targets, not the inputs.

    >>> clients = [(torch.zeros(6, 2), torch.tensor([0, 0, 0, 0, 0, 1])), (torch.zeros(2, 2), torch.tensor([1, 1]))]
    >>> found = describe_partition(Task(nn.Linear(2, 2), *pool_clients(clients)))
    >>> found.counts.tolist(), round(found.label_skew, 3), found.size_skew
    ([[5, 1], [0, 2]], 0.417, 0.25)
    """
    groups, clients = task.train.groups, task.clients
    targets = (task.train.targets if groups is None else groups).cpu().numpy()
    names = task.client_names or tuple(str(i) for i in range(len(clients)))
    kind: Any = "labels" if task.loss is bce else "numbers" if targets.dtype.kind == "f" else "classes"
    owner, known = np.repeat(np.arange(len(clients)), clients.sizes()), task.class_names
    rows = targets[clients.order].reshape(len(clients.order), -1)
    if kind == "numbers":
        used = rows[:, 0].astype(np.float64)
        edges = np.unique(np.quantile(used, np.linspace(0, 1, BINS + 1)))
        edges = edges if len(edges) > 1 else np.repeat(edges, 2)
        code = np.clip(np.searchsorted(edges, used, side="right") - 1, 0, len(edges) - 2)
        known = tuple(f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges))
    else:  # several labels of an example count each; of sequences, all labels that are not ignored
        at, column = np.nonzero(rows > 0 if kind == "labels" else (rows != IGNORED) & (rows >= 0))
        owner, code = owner[at], column if kind == "labels" else rows[at, column].astype(np.int64)
        classes = rows.shape[1] if kind == "labels" else int(code.max(initial=0)) + 1
        known = known if len(known) >= classes else tuple(str(k) for k in range(classes))
    width = len(known)
    counts = np.bincount(owner * width + code, minlength=len(clients) * width).reshape(len(clients), width)
    held_out = () if task.client_tests is None else task.client_tests.order
    unused = len(targets) - len(np.union1d(clients.order, held_out))
    return PartitionDescription(kind, clients.sizes(), counts, known, names, unused)
