"""Data and model of a deployment in which each site has a folder of its own.

    SiteData     how a folder becomes examples: columns, classes and scales, the same at all sites
    SiteTable    a table in a file                   SiteTexts     texts in a table
    SiteImages   images in one folder a class        SiteRecords   conversations or texts for a language model
    OwnData      a `SiteData`, a model, metrics: the task of a site, of the server, and of all sites in a simulation

Everything that decides shapes is stated in the app, not derived from a site's records: sites differ in size, and some
have no example of a class.
"""

from __future__ import annotations

import tomllib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.data.causal_lm import Encoder, Learned, RecordForm, TemplateName, TooLong, options_of
from thinwire.data.checkpoints import SMOLLM2, find_checkpoint, load_tokenizer
from thinwire.data.columns import Columns, read_records, read_table
from thinwire.data.examples import Arrays, Examples, Images
from thinwire.data.images import ImageShape, images_in, read_files
from thinwire.data.losses import Loss, loss_by_name
from thinwire.data.partition import Assignment, offsets_of
from thinwire.data.table import Features, InputColumn, TargetCode
from thinwire.data.task import Task, make_module
from thinwire.data.text import FIRST_WORD, id_rows, words
from thinwire.data.token_rows import TokenRows
from thinwire.errors import ConfigError, DataError
from thinwire.metrics.base import Metric, metrics_by_name

Pair = tuple[Any, Any]  # inputs and targets, one row for each example: tensors, or lists of rows that differ in length
Scale = tuple[float, float]  # mean and standard deviation

FAR = 3.0  # standard deviations from which `site check` warns about a column
BLANK = 2  # examples of the machine without data: batch norm needs two


class SiteData(ABC):
    """How the folder of a site becomes examples; the same at all sites.

    The defaults are those of data in one file, with the classes of `classes`.
    """

    file: str
    classes: tuple[str, ...]
    loss = "cross-entropy"
    note = ""  # what was done to the records, for readers of results

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, int]:
        """What a model needs to know of the inputs, by the name of its parameter, such as `inputs`."""

    @abstractmethod
    def read(self, folder: Path) -> Pair:
        """Inputs and targets of all records of a site."""

    @abstractmethod
    def blank(self, rows: int) -> Pair:
        """Inputs and targets of the right shape without contents, for a machine that has no data."""

    def examples(self, inputs: Any, targets: Any) -> Examples:
        """The examples of inputs and targets that were read."""
        return Arrays(inputs, targets)

    @property
    def outputs(self) -> int:
        """The number of outputs of a model."""
        return len(self.classes)

    @property
    def expected(self) -> str:
        """What a site's folder holds, in a few words, for error messages."""
        return f"the file {self.file}"

    def warnings(self, folder: Path) -> list[str]:
        """What is unusual about the records of a site, though they can be trained on."""
        return []

    def is_site(self, folder: Path) -> bool:
        """Whether a folder is that of a site."""
        return (folder / self.file).is_file()


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
            data_dir: a folder with one folder for each site: client 0 is the first in alphabetical order, or, as in a
                deployment, that of the roster, if the folder has its `roster.toml`.
            clients: number of sites.
        """
        folder, one = Path(data_dir or "").expanduser(), f"site that has {self.data.expected}"
        if data_dir is None or not folder.is_dir():
            raise DataError(f"{folder}: no such folder; write --data-dir FOLDER, with one folder for each {one}")
        listed = _by_client(folder / "roster.toml") or sorted(path.name for path in folder.iterdir() if path.is_dir())
        found = [folder / name for name in listed if self.data.is_site(folder / name)]
        if len(found) != clients:
            raise DataError(
                f"{folder}: {len(found)} of its folders are those of a {one}, but task.clients is {clients}; "
                f"write --clients {max(1, len(found))}, or name a folder with one folder for each site"
            )
        pairs = [self.data.read(path) for path in found]
        sizes = np.array([len(targets) for _, targets in pairs])
        every = Assignment(np.arange(sizes.sum()), offsets_of(sizes))
        return self._task(pairs, every, client_names=tuple(path.name for path in found))

    def at_site(self, data_dir: Path, clients: int = 3) -> Task:
        """The task of a site: every client number has its records, since the site does not decide which it gets.

        Args:
            data_dir: the folder of the site.
            clients: number of clients of the deployment.
        """
        if not self.data.is_site(data_dir):
            raise DataError(f"{data_dir} is not the folder of a site; expected {self.data.expected}")
        pair = self.data.read(data_dir)
        return self._task([pair], _each(len(pair[1]), clients))

    def without_examples(self, clients: int, validation: bool = False) -> Task:
        """The task of a machine that has no data, as the server: the model, and examples without contents.

        Args:
            clients: number of clients of the deployment.
            validation: whether sites hold examples out to evaluate the model.
        """
        every, note = _each(BLANK, clients), "This machine has no data: the examples are at the sites."
        tests = every if validation else None
        return self._task([self.data.blank(BLANK)], every, note, client_tests=tests, blank=True)

    def _task(self, pairs: Sequence[Pair], clients: Assignment, note: str = "", **more: Any) -> Task:
        """The task of the examples of some sites."""
        loss = self.loss or self.data.loss
        return Task(
            make_module(self.model, {**self.data.shapes, "classes": self.data.outputs}),
            self.data.examples(*(_joined(parts) for parts in zip(*pairs, strict=True))),
            clients,
            loss=loss_by_name(loss) if isinstance(loss, str) else loss,
            note=" ".join(filter(None, (note, self.data.note))),
            metrics=self.metrics if isinstance(self.metrics, Mapping) else metrics_by_name(self.metrics),
            objective=self.objective,
            class_names=self.data.classes,
            **more,
        )


def _by_client(roster: Path) -> list[str]:
    """The names of the sites of a roster in the order of their clients; empty if there is no file."""
    if not roster.is_file():
        return []
    try:
        sites = [one for one in tomllib.loads(roster.read_text())["sites"] if not one.get("revoked")]
        return [name for _, name in sorted((client, str(one["name"])) for one in sites for client in one["clients"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{roster} is not a roster ({error}); copy that of the deployment, or remove it") from error


def _joined(parts: Sequence[Any]) -> Any:
    """Tensors or lists of several sites, one after another."""
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else [row for part in parts for row in part]


def _each(rows: int, clients: int) -> Assignment:
    """The same rows for every client."""
    return Assignment(np.tile(np.arange(rows), clients), rows * np.arange(clients + 1))


def _check_classes(classes: Sequence[str]) -> None:
    """Raise ConfigError if a list of classes is no list of two or more different texts."""
    texts = not isinstance(classes, str) and all(isinstance(one, str) and one for one in classes)
    if not texts or len(set(classes)) < max(2, len(classes)):
        raise ConfigError(f'classes must be two or more different texts, such as ("no", "yes"), not {classes!r}')


def _class_targets(rows: Columns, target: str, classes: tuple[str, ...]) -> Tensor:
    """(rows,) int64: the position of each row's class in the list of the app."""
    return TargetCode("classification", (target,), classes, listed="the classes of task.py").encode(rows)


@dataclass(frozen=True)
class SiteTable(SiteData):
    """A table in a CSV or parquet file of each site, of the same name at all of them.

        number      (x - mean) / std      both named in the app, or, with None, computed from the site's own rows
        category    one input for each text that the app names, and one for all other texts
        class       its position in the list of the app; a site need not have examples of all classes

    Args:
        file: the name of the file in the folder of a site.
        target: the column to predict.
        classes: the classes of all sites, in the order of the model's outputs; empty for a regression.
        numbers: columns of numbers, and the mean and standard deviation by which each is scaled: constants that are the
            same at all sites; None for those of the site's own rows.
        categories: columns of texts, and the texts that have an input of their own.
        missing: columns of numbers in which cells may be empty: an empty one becomes the mean, and a second input is 1.
        target_scale: of a regression, mean and standard deviation by which the target is scaled.

    >>> table = SiteTable("visits.csv", "stay", ("short", "long"), {"age": (60.0, 20.0)}, {"ward": ("A", "B")})
    >>> table.shapes, table.outputs
    ({'inputs': 4}, 2)
    """

    file: str
    target: str
    classes: tuple[str, ...] = ()
    numbers: Mapping[str, Scale | None] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    target_scale: Scale = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not self.numbers and not self.categories:
            raise ConfigError("SiteTable has no inputs; name columns in numbers or categories")
        if self.classes:
            _check_classes(self.classes)
        for name in self.missing:
            if name not in self.numbers:
                raise ConfigError(f"missing names {name!r}, which is not in numbers")
        for name, scale in (*self.numbers.items(), (self.target, self.target_scale)):
            if scale is not None and not (len(scale) == 2 and np.isfinite(scale).all() and scale[1] > 0):
                raise ConfigError(
                    f"the scale of column {name!r} must be a mean and a standard deviation above 0, not {scale!r}"
                )

    @property
    def loss(self) -> str:  # type: ignore[override]
        """Cross entropy for classes, else the squared error."""
        return "cross-entropy" if self.classes else "mse"

    @property
    def outputs(self) -> int:
        """The number of classes; 1 for a regression."""
        return len(self.classes) or 1

    @property
    def shapes(self) -> Mapping[str, int]:
        """The number of inputs."""
        texts = sum(len(known) + 1 for known in self.categories.values())
        return {"inputs": len(self.numbers) + len(self.missing) + texts}

    @property
    def note(self) -> str:  # type: ignore[override]
        """Where the scales come from."""
        own = [name for name, scale in self.numbers.items() if scale is None]
        more = f", but by the site's own rows: {', '.join(own)}" if own else ""
        return f"Numbers are scaled by constants of the app{more}."

    def read(self, folder: Path) -> Pair:
        """The rows of the file."""
        rows, (mean, std) = read_table(folder / self.file), self.target_scale
        for name in (*self.numbers, *self.categories):
            rows.need(name, "an input named in task.py")
        texts = (InputColumn(name, categories=tuple(known)) for name, known in self.categories.items())
        rows.need(self.target, "the target named in task.py")
        inputs = Features((*(self._number(name, rows) for name in self.numbers), *texts)).encode(rows)
        if self.classes:
            return inputs, _class_targets(rows, self.target, self.classes)
        code = TargetCode("regression", (self.target,), (self.target,), mean=(mean,), std=(std,))
        return inputs, code.encode(rows)

    def warnings(self, folder: Path) -> list[str]:
        """Columns whose mean or standard deviation is far from that of the app, as in other units."""
        rows, found = read_table(folder / self.file), []
        for name, scale in {**self.numbers, self.target: None if self.classes else self.target_scale}.items():
            values = rows.need_numbers(name, "a number") if scale else np.zeros(0)
            values = values[~np.isnan(values)]
            if scale is None or len(values) < 2:
                continue
            mean, std = float(values.mean()), float(values.std())
            if abs(mean - scale[0]) > FAR * scale[1] or not 0.1 < std / scale[1] < FAR:
                found.append(
                    f"column {name!r} has mean {mean:.3g} and standard deviation {std:.3g} here, the app states "
                    f"{scale[0]:g} and {scale[1]:g}: is it in other units?"
                )
        return found

    def blank(self, rows: int) -> Pair:
        """Rows of zeros."""
        targets = torch.zeros(rows, dtype=torch.int64 if self.classes else torch.float32)
        return torch.zeros(rows, self.shapes["inputs"]), targets

    def _number(self, name: str, rows: Columns) -> InputColumn:
        """How a column of numbers is scaled at a site."""
        values, scale, empty = rows.need_numbers(name, "a number"), self.numbers[name], name in self.missing
        absent = np.isnan(values)
        if absent.any() and not empty:
            raise DataError(
                f"{rows.row(int(absent.argmax()))} has no value in the column {name!r}; fill it in, or write "
                f"missing=({name!r},) in task.py at all sites"
            )
        if scale is None and absent.all():
            raise DataError(f"{rows.where}: column {name!r} has no values to compute its scale; name one in task.py")
        column = InputColumn.of(name, rows) if scale is None else InputColumn(name, *scale)
        return replace(column, missing=empty)


@dataclass(frozen=True)
class SiteImages(SiteData):
    """PNG or JPEG images in one folder for each class; a class without a folder has no examples at this site.

        x -> (pixel / 255 - mean) / std  by constants of the app; by default 0 and 1

    Args:
        classes: the classes of all sites, the names of folders, in the order of the model's outputs.
        size: height and width, or one number for both, to which all images are resized.
        channels: 1 for gray, 3 for color.
        mean, std: of each channel, by which values from 0 to 1 are scaled: constants that are the same at all sites.

    >>> SiteImages(("benign", "malignant"), size=32).shapes
    {'channels': 3, 'height': 32, 'width': 32, 'inputs': 3072}
    """

    classes: tuple[str, ...]
    size: int | tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    note = "Images are scaled by constants of the app."

    def __post_init__(self) -> None:
        _check_classes(self.classes)
        if self.channels not in (1, 3) or min(self._size) < 1:
            raise ConfigError(
                f"SiteImages needs channels of 1 or 3 and a size of 1 or more, not {self.channels} and {self.size}"
            )
        if not {len(self.mean), len(self.std)} <= {1, self.channels} or not all(one > 0 for one in self.std):
            raise ConfigError(
                f"mean and std must have 1 or {self.channels} values, std above 0, not {self.mean} and {self.std}"
            )

    @property
    def _size(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def shapes(self) -> Mapping[str, int]:
        """Channels, height and width."""
        height, width = self._size
        return {"channels": self.channels, "height": height, "width": width, "inputs": self.channels * height * width}

    @property
    def expected(self) -> str:
        """Folders of classes."""
        return f"folders of images with the names of classes, such as {self.classes[0]}"

    def is_site(self, folder: Path) -> bool:
        """Whether the folder has a folder of one of the classes."""
        return any((folder / name).is_dir() for name in self.classes)

    def read(self, folder: Path) -> Pair:
        """All images, by class in the order of the app; a folder of no class of the app is an error."""
        rows = images_in(folder)
        targets = _class_targets(rows, "label", self.classes)
        order = targets.argsort(stable=True)
        return read_files(rows.take(order.numpy()), ImageShape(self.channels, *self._size, True)), targets[order]

    def blank(self, rows: int) -> Pair:
        """Black images."""
        pixels = torch.zeros(rows, self.channels, *self._size, dtype=torch.uint8)
        return pixels, torch.zeros(rows, dtype=torch.int64)

    def examples(self, inputs: Tensor, targets: Tensor) -> Examples:
        """Images stored as bytes, scaled when they are used."""
        mean, std = (one * (self.channels // len(one)) for one in (self.mean, self.std))
        return Images(inputs, targets, mean, std)


@dataclass(frozen=True)
class SiteTexts(SiteData):
    """Texts in a CSV or parquet file of each site: a column of texts and a column of classes.

        word -> 3 + crc32(word) mod (words - 3)

    Word ids are a hash, so that sites need no common vocabulary. Two words may share an id. 0 is padding, 1 a text
    without words.

    Args:
        file: the name of the file in the folder of a site.
        text: the column of texts.
        target: the column of classes.
        classes: the classes of all sites, in the order of the model's outputs.
        length: number of words of a text that are used.
        words: number of word ids.

    >>> notes = SiteTexts("notes.csv", "note", "urgent", ("no", "yes"), length=3, words=100)
    >>> notes.ids(["Fever, fever and cough!", ""]).tolist()
    [[13, 13, 22], [1, 0, 0]]
    """

    file: str
    text: str
    target: str
    classes: tuple[str, ...]
    length: int = 128
    words: int = 20_000

    def __post_init__(self) -> None:
        _check_classes(self.classes)
        if self.length < 1 or self.words <= FIRST_WORD:
            raise ConfigError(
                f"length must be 1 or more and words above {FIRST_WORD}, not {self.length} and {self.words}"
            )

    @property
    def shapes(self) -> Mapping[str, int]:
        """The number of word ids, and of words of a text."""
        return {"words": self.words, "length": self.length}

    @property
    def note(self) -> str:  # type: ignore[override]
        """What was done to the texts."""
        return f"The first {self.length} words of a text are used; word ids are a hash of the word."

    def read(self, folder: Path) -> Pair:
        """The rows of the file."""
        rows = read_table(folder / self.file)
        rows.need(self.text, "the texts named in task.py")
        rows.need(self.target, "the target named in task.py")
        texts = [text or "" for text in rows.texts(self.text)]
        return self.ids(texts), _class_targets(rows, self.target, self.classes)

    def blank(self, rows: int) -> Pair:
        """Texts without words."""
        return self.ids([""] * rows), torch.zeros(rows, dtype=torch.int64)

    def ids(self, texts: list[str]) -> Tensor:
        """(texts, length) int64 word ids, padded with 0."""
        split = [words(text) for text in texts]
        known = {word for text in split for word in text}
        hashed = {word: FIRST_WORD + zlib.crc32(word.encode()) % (self.words - FIRST_WORD) for word in known}
        return torch.from_numpy(id_rows(split, hashed, self.length))


@dataclass(frozen=True)
class SiteRecords(SiteData):
    """Conversations or texts in a JSONL, JSON, CSV or parquet file of each site, for a language model.

    Args:
        file: the name of the file in the folder of a site.
        checkpoint: of the model, the same at all sites: a folder, a GGUF file, `smollm2`, or owner/name on the hub.
        prompt, response, messages, text: the columns, as in the task `causal-lm`; by default the usual names.
        template, learned, length, too_long: as in that task.
        window: batches within which rows of similar length are put together in training.
    """

    file: str = "records.jsonl"
    checkpoint: str = SMOLLM2
    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    template: TemplateName = "auto"
    learned: Learned = "answers"
    length: int = 512
    too_long: TooLong = "drop"
    window: int = 8
    classes = ()

    def encoder(self, form: RecordForm | None = None) -> Encoder:
        """How records become tokens."""
        return Encoder(_tokenizer(self.checkpoint), form or RecordForm(), **options_of(Encoder, vars(self)))

    @property
    def outputs(self) -> int:
        """The number of tokens."""
        return len(_tokenizer(self.checkpoint))

    @property
    def shapes(self) -> Mapping[str, int]:
        """The most tokens of a row."""
        return {"length": self.length}

    @property
    def note(self) -> str:  # type: ignore[override]
        """What was done to the records."""
        return f"Rows of at most {self.length} tokens, conversations written by {self.encoder().written}."

    def read(self, folder: Path) -> Pair:
        """The records of the file: the tokens of each row, and whether each token is learned."""
        records = read_records(folder / self.file)
        form = RecordForm.of(records, **options_of(RecordForm, vars(self)))
        ids, learned = zip(*self.encoder(form).encode(records)[0], strict=True)
        return ids, learned

    def blank(self, rows: int) -> Pair:
        """Rows of two equal tokens."""
        return [(0, 0)] * rows, [(False, True)] * rows

    def examples(self, inputs: Any, targets: Any) -> Examples:
        """Rows of tokens."""
        rows = list(zip(inputs, targets, strict=True))
        return TokenRows.of(rows, pad=self.encoder().pad, window=self.window)


@lru_cache(maxsize=4)
def _tokenizer(checkpoint: str) -> Any:
    return load_tokenizer(find_checkpoint(checkpoint), "SiteRecords")
