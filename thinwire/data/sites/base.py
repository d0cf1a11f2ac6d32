"""Data and model of a deployment in which each site has a folder of its own.

    SiteData     how a folder becomes examples: columns, classes and scales, the same at all sites
    OwnData      a `SiteData`, a model, metrics: the task of a site, of the server, and of all sites in a simulation

Everything that decides shapes is stated in the app, not derived from a site's records: sites differ in size, and some
have no example of a class.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.data.examples import Arrays, Examples
from thinwire.data.losses import Loss, loss_by_name
from thinwire.data.partitions.base import Assignment, offsets_of
from thinwire.data.task import Task
from thinwire.errors import ConfigError, DataError
from thinwire.metrics.base import Metric, metrics_by_name

Pair = tuple[Tensor, Tensor]  # inputs and targets, one row for each example

BLANK = 2  # examples of the machine without data: batch norm needs two


class SiteData(ABC):
    """How the folder of a site becomes examples; the same at all sites."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The number of outputs of a model: classes, or 1."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, int]:
        """What a model needs to know of the inputs, by the name of its parameter, such as `inputs`."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """What a site's folder holds, in a few words, for error messages."""

    @abstractmethod
    def is_site(self, folder: Path) -> bool:
        """Whether a folder is that of a site."""

    @abstractmethod
    def read(self, folder: Path) -> Pair:
        """Inputs and targets of all records of a site."""

    @abstractmethod
    def blank(self, rows: int) -> Pair:
        """Inputs and targets of the right shape without contents, for a machine that has no data."""

    def examples(self, inputs: Tensor, targets: Tensor) -> Examples:
        """The examples of inputs and targets that were read."""
        return Arrays(inputs, targets)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by number; empty for a regression."""
        return ()

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return "cross-entropy" if self.class_names else "mse"

    @property
    def note(self) -> str:
        """What was done to the records, for readers of results."""
        return ""


@dataclass(frozen=True, eq=False)
class OwnData:
    """Data and model of a deployment, the same at all sites.

        at_site(folder)       the task of a site, which has its own records
        without_examples()    the task of the server, which has none
        task(folder)          all sites in a simulation: a folder with one folder for each

    Args:
        data: how a folder becomes examples.
        model: a class or function that makes the model, called with those of its parameters that the data states:
            `classes`, and `inputs` (a table), `channels`, `height`, `width` (images), `words` (texts).
        metrics: metrics besides loss and accuracy: names (`thinwire list metrics`), or functions by name.
        loss: the loss, or its name; by default cross entropy for classes, else the squared error.
        objective: what rounds are ranked by: `accuracy`, `loss` or one of the metrics.

    >>> import tempfile
    >>> from thinwire.data.sites import SiteTable
    >>> pets = SiteTable("pets.csv", target="species", classes=("cat", "dog"), numbers={"grams": (600.0, 250.0)})
    >>> own = OwnData(pets, lambda inputs, classes: nn.Linear(inputs, classes), metrics=("f1",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "pets.csv").write_text("grams,species\\n850,dog\\n350,cat\\n600,dog\\n")
    ...     task = own.at_site(Path(folder), clients=2)
    >>> task.train.inputs[:, 0].tolist(), task.train.targets.tolist(), task.clients.sizes().tolist()
    ([1.0, -1.0, 0.0], [1, 0, 1], [3, 3])
    """

    data: SiteData
    model: Callable[..., nn.Module]
    metrics: Sequence[str] | Mapping[str, Metric] = ()
    loss: str | Loss = ""
    objective: str = ""

    def task(self, data_dir: Path | None = None, clients: int = 3) -> Task:
        """The task of all sites, for a simulation.

        Args:
            data_dir: a folder with one folder for each site: client 0 is the first in alphabetical order.
            clients: number of sites.
        """
        module = self._module()
        if data_dir is None:
            raise DataError(
                f"no folder of data is named; write --data-dir FOLDER, with one folder for each {self._one}"
            )
        folders = self._folders(Path(data_dir).expanduser(), clients)
        pairs = [self.data.read(folder) for folder in folders]
        sizes = np.array([len(targets) for _, targets in pairs])
        inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        names = tuple(folder.name for folder in folders)
        return self._task(module, inputs, targets, Assignment(np.arange(len(targets)), offsets_of(sizes)), names=names)

    def at_site(self, data_dir: Path, clients: int = 3) -> Task:
        """The task of a site: every client number has its records, since the site does not decide which it gets.

        Args:
            data_dir: the folder of the site.
            clients: number of clients of the deployment.
        """
        module = self._module()
        if not self.data.is_site(data_dir):
            raise DataError(f"{data_dir} is not the folder of a site; expected {self.data.expected}")
        inputs, targets = self.data.read(data_dir)
        return self._task(module, inputs, targets, _each(len(targets), clients))

    def without_examples(self, clients: int, validation: bool = False) -> Task:
        """The task of a machine that has no data, as the server: the model, and examples without contents.

        Args:
            clients: number of clients of the deployment.
            validation: whether sites hold examples out to evaluate the model.
        """
        module = self._module()
        every, note = _each(BLANK, clients), "This machine has no data: the examples are at the sites."
        return self._task(module, *self.data.blank(BLANK), every, note, client_tests=every if validation else None)

    def _task(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        clients: Assignment,
        note: str = "",
        names: tuple[str, ...] = (),
        client_tests: Assignment | None = None,
    ) -> Task:
        chosen = self.metrics
        return Task(
            module,
            self.data.examples(inputs, targets),
            clients,
            client_tests=client_tests,
            loss=loss_by_name(self.loss or self.data.loss) if isinstance(self.loss, str) else self.loss,
            note=" ".join(filter(None, (note, self.data.note))),
            metrics=dict(chosen) if isinstance(chosen, Mapping) else metrics_by_name(chosen),
            objective=self.objective,
            class_names=self.data.class_names,
            client_names=names,
        )

    @property
    def _one(self) -> str:
        return f"site that has {self.data.expected}"

    def _folders(self, folder: Path, clients: int) -> list[Path]:
        """The folders of all sites."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected one with a folder for each {self._one}")
        found = sorted(path for path in folder.iterdir() if path.is_dir() and self.data.is_site(path))
        if len(found) != clients:
            raise DataError(
                f"{folder}: {len(found)} of its folders are those of a {self._one}, but task.clients is {clients}; "
                f"write --clients {max(1, len(found))}, or name a folder with one folder for each site"
            )
        return found

    def _module(self) -> nn.Module:
        """The model, with the shapes that the data states."""
        known = inspect.signature(self.model).parameters
        stated: dict[str, Any] = {**self.data.shapes, "classes": self.data.outputs}
        made = self.model(**{name: value for name, value in stated.items() if name in known})
        if not isinstance(made, nn.Module):
            raise ConfigError(f"the model of the app is an object of type {type(made).__name__}, not a torch nn.Module")
        return made


def _each(rows: int, clients: int) -> Assignment:
    """The same rows for every client."""
    return Assignment(np.tile(np.arange(rows), clients), rows * np.arange(clients + 1))
