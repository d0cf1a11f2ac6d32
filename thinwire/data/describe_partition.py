"""Who has what: the examples of each client, by class, and two numbers for how unequal clients are.

    label skew   mean over clients of  1/2 sum over classes |p_client - p_all|   (total variation distance)
    size skew    Gini coefficient of the numbers of examples

Both are 0 if all clients are alike, and approach 1 the more they differ. Of few examples, even a random choice has a
label skew above 0. The targets of a regression are counted in ten bins with equally many examples.

>>> import torch
>>> from torch import nn
>>> from thinwire.data.task import pool_clients
>>> clients = [(torch.zeros(6, 2), torch.tensor([0, 0, 0, 0, 0, 1])), (torch.zeros(2, 2), torch.tensor([1, 1]))]
>>> found = describe_partition(Task(nn.Linear(2, 2), *pool_clients(clients)))
>>> found.counts.tolist(), round(found.label_skew, 3), found.size_skew
([[5, 1], [0, 2]], 0.417, 0.25)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from thinwire.data.losses import bce
from thinwire.data.task import Task
from thinwire.metrics.classification import IGNORED

BINS = 10
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)

Kind = Literal["classes", "labels", "numbers"]


@dataclass(frozen=True, eq=False)
class PartitionDescription:
    """Who has what.

    Args:
        kind: what the targets are: `classes`, `labels` (several for each example) or `numbers` (a regression).
        sizes: (clients,) training examples of each client.
        validation: (clients,) held-out examples of each client.
        counts: (clients, classes) examples of each class; for labels, examples that have it; for numbers, in each bin.
        class_names: of the columns of `counts`.
        client_names: of the rows.
        quantiles: (clients, 5) of numbers: lowest, quartiles and highest target of each client; otherwise None.
        unused: training examples of no client.
    """

    kind: Kind
    sizes: np.ndarray
    validation: np.ndarray
    counts: np.ndarray
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]
    quantiles: np.ndarray | None = None
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
        out = []
        for i, (name, distance) in enumerate(zip(self.client_names, self.distances.tolist(), strict=True)):
            row: dict[str, Any] = {"client": name, "examples": int(self.sizes[i])}
            if self.validation.any():
                row["validation"] = int(self.validation[i])
            if self.quantiles is not None:
                row["quantiles"] = self.quantiles[i].tolist()
            else:
                row["classes"] = {name: int(n) for name, n in zip(self.class_names, self.counts[i], strict=True) if n}
            out.append({**row, "label_skew": round(distance, 6)})
        return out

    def summary(self) -> dict[str, Any]:
        """The numbers of the whole partition."""
        return {
            "clients": len(self),
            "examples": int(self.sizes.sum()),
            "unused_examples": self.unused,
            "examples_per_client": {
                "min": int(self.sizes.min()),
                "median": float(np.median(self.sizes)),
                "max": int(self.sizes.max()),
            },
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
    """Who has what in a task; reads the targets, not the inputs."""
    groups, clients, tests = task.train.groups, task.clients, task.client_tests
    targets = (task.train.targets if groups is None else groups).cpu().numpy()
    names = task.client_names or tuple(str(i) for i in range(len(clients)))
    kind: Kind = "labels" if task.loss is bce else "numbers" if targets.dtype.kind == "f" else "classes"
    owner, known, quantiles = np.repeat(np.arange(len(clients)), clients.sizes()), task.class_names, None
    rows = targets[clients.order].reshape(len(clients.order), -1)
    if kind == "numbers":
        used = rows[:, 0].astype(np.float64)
        quantiles = np.stack([np.quantile(one, QUANTILES) for one in np.split(used, clients.offsets[1:-1])])
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
    validation = np.zeros(len(clients), np.int64) if tests is None else tests.sizes()
    unused = len(targets) - len(np.unique(clients.order)) - int(validation.sum())
    return PartitionDescription(kind, clients.sizes(), validation, counts, known, names, quantiles, max(unused, 0))
