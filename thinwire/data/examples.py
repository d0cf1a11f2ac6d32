"""Examples stored in a few large tensors and gathered by index, for many clients at once.

Images are stored as bytes and windows of text as one string of codes. A batch is converted when it is gathered, on the
device of the tensors. All clients share one copy of the data.

>>> import torch
>>> pool = Arrays(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0]))
>>> x, y = pool.gather(torch.tensor([[2, 0]]))     # an index of any shape: here one client, two examples
>>> x.shape, y.tolist()
(torch.Size([1, 2, 2]), [[0, 0]])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from thinwire.core.key import Device
from thinwire.core.tree import Tree

Inputs: TypeAlias = "Tensor | tuple[Tensor, ...] | Tree"  # what a model is called with: see `arguments`


def arguments(forward: Callable[..., Any], inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """The positional and keyword arguments of a forward pass for a batch.

        tensor        forward(inputs)
        tuple         forward(*inputs)
        dictionary    forward(**inputs); forward(inputs) if its only parameter has another name

    >>> arguments(lambda batch: batch["a"], {"a": 1}), arguments(lambda a, b: a, {"a": 1})
    ((({'a': 1},), {}), ((), {'a': 1}))
    """
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, dict):
        known = list(inspect.signature(forward).parameters.values())
        if len(known) != 1 or known[0].kind == known[0].VAR_KEYWORD or known[0].name in inputs:
            return (), inputs
    return (inputs,), {}


def named(inputs: Inputs, word: str) -> dict[str, Tensor]:
    """The tensors of inputs, each under a word and its name or number where there are several.

    >>> list(named((torch.zeros(1), torch.zeros(1)), "input"))
    ['input 0', 'input 1']
    """
    if isinstance(inputs, Tensor):
        return {word: inputs}
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return {f"{word} {name!r}": one for name, one in pairs}


class Examples(Protocol):
    """A set of examples that are gathered by index; classes that subclass it explicitly inherit the defaults.

    With augmentation an example has several variants: index i + n v is example i of n in variant v, where variant 0 is
    the example without augmentation. Evaluation uses indices below n; training draws a random variant.
    """

    def __len__(self) -> int: ...

    if TYPE_CHECKING:  # at run time an inherited property would shadow a dataclass field of the same name

        @property
        def targets(self) -> Tensor:
            """(n, ...) the targets, one row per example; integer class labels for partitions by class."""
            ...

    variants: int = 1
    """The number of augmented variants of each example; 1 without augmentation."""
    sizes: Tensor | None = None
    """(n,) the length of each example, where they differ in length; None if all have one shape."""
    groups: Tensor | None = None
    """(n,) int64 group of each example, by which partitions go instead of targets; None for the targets."""
    window: int = 1
    """Batches of training within which examples of similar size are put together; 1 for none."""

    def widest(self, index: Tensor) -> Tensor:
        """Some of these examples that are gathered with the largest shape; any one where all have the same."""
        return index[:1]

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the examples in `index`, int64 of shape S; results have the shape (*S, ...)."""
        ...

    def to(self, device: Device) -> Self:
        """The same examples on another device; of a dataclass, all tensors and examples among its fields are moved."""
        held = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        moved = tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, held)
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Arrays(Examples):
    """Examples that are rows of tensors."""

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Rows by index."""
        return tree_map(lambda block: block[index], self.inputs), self.targets[index]


@dataclass(frozen=True, eq=False)
class Images(Examples):
    """Images stored as bytes and normalized when gathered:  (pixel / 255 - mean) / std  per channel.

    Args:
        pixels: (n, channels, height, width) uint8.
        targets: (n,) int64 class labels.
        mean, std: one value per channel; with the defaults pixels are in [0, 1].
    """

    pixels: Tensor
    targets: Tensor
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Images by index, as float32."""
        return self.scaled(self.pixels[index]), self.targets[index]

    def scaled(self, pixels: Tensor) -> Tensor:
        """Normalize bytes to float32."""
        x = pixels.to(torch.float32).div_(255)
        if self.mean != (0.0,) or self.std != (1.0,):
            mean, std = self.statistics
            x = x.sub_(mean).div_(std)
        return x

    @cached_property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation on the device of the pixels: a copy for every batch would block the device."""
        shape, device = (len(self.mean), 1, 1), self.pixels.device
        return torch.tensor(self.mean, device=device).view(shape), torch.tensor(self.std, device=device).view(shape)


@dataclass(frozen=True, eq=False)
class AugmentedImages(Examples):
    """Images with augmentation by random shift and horizontal flip; variants are computed when gathered.

    Variant 0 is the image itself. Pixels from outside the image are black.

    Args:
        images: the images.
        max_shift: maximum shift in pixels, up, down, left and right.

    >>> images = Images(torch.eye(3, dtype=torch.uint8).view(1, 1, 3, 3) * 255, torch.zeros(1))
    >>> pool = AugmentedImages(images, max_shift=1)
    >>> len(pool), pool.variants                                     # 3 rows x 3 columns x (original, flipped)
    (1, 18)
    >>> pool.gather(torch.tensor([0, 1]))[0].squeeze(1).tolist()[1]  # variant 1: flipped
    [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """

    images: Images
    max_shift: int = 4

    def __len__(self) -> int:
        return len(self.images)

    @property
    def targets(self) -> Tensor:
        """The targets of the images."""
        return self.images.targets

    @property
    def variants(self) -> int:  # type: ignore[override]
        """The number of shifts times two, with and without a flip."""
        return 2 * (2 * self.max_shift + 1) ** 2

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Images by index, shifted and flipped as the variant in the index defines."""
        most, span = self.max_shift, 2 * self.max_shift + 1
        image, variant = index % len(self), index // len(self)
        # shifts are counted from 0, so that variant 0 is the image itself
        top, left = (2 * most - (shift + most) % span for shift in (variant // 2 // span, variant // 2 % span))
        channel, rows, columns = (torch.arange(size, device=index.device) for size in self.images.pixels.shape[1:])
        columns = torch.where((variant % 2).bool()[..., None], columns.flip(0), columns) + left[..., None]
        rows = rows + top[..., None]
        where = (image[..., None, None, None], channel[:, None, None], rows[..., None, :, None])
        return self.images.scaled(self.framed[*where, columns[..., None, None, :]]), self.targets[image]

    @cached_property
    def framed(self) -> Tensor:
        """The images in a frame of black pixels, as wide as the largest shift."""
        return F.pad(self.images.pixels, (self.max_shift,) * 4)


@dataclass(frozen=True, eq=False)
class TextWindows(Examples):
    """Windows of one long text: the input is `length` characters, the target is the next character.

    Args:
        codes: (characters,) uint8 codes of the whole text.
        starts: (n,) int64 first position of each window.
        length: characters in a window.
    """

    codes: Tensor
    starts: Tensor
    length: int = 80

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def targets(self) -> Tensor:
        """The character after each window."""
        return self.codes[self.starts + self.length].long()

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Windows by index, as int64 codes."""
        first = self.starts[index]
        offsets = torch.arange(self.length, device=first.device)
        return self.codes[first[..., None] + offsets].long(), self.codes[first + self.length].long()


@dataclass(frozen=True, eq=False)
class Relabeled(Examples):
    """Examples whose targets are replaced, one row each; the inputs are shared.

    >>> pool = Relabeled(Arrays(torch.arange(3.0), torch.tensor([0, 1, 2])), torch.tensor([2, 1, 0]))
    >>> pool.gather(torch.tensor([0, 2]))[1].tolist()
    [2, 0]
    """

    examples: Examples
    targets: Tensor

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def variants(self) -> int:  # type: ignore[override]
        """Those of the examples."""
        return self.examples.variants

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs of the examples, and the targets that replace theirs."""
        return self.examples.gather(index)[0], self.targets[index % len(self)]


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset: training and test examples, and the user of each example where the dataset has users.

    Args:
        train, test: the official splits.
        classes: number of classes.
        users: (n_train,) the user of each training example, numbered from 0, or None.
        test_users: the same for the test examples, or None.
        note: a remark for readers of results about this copy of the data (for example, that it is lossy).
        model: options that a model needs for these examples, such as the checkpoint of their tokenizer.
        loss: the name of the loss (`thinwire.data.losses`).
        metrics: names of metrics to compute besides loss and accuracy.
        objective: what rounds and runs are ranked by; "" for accuracy if targets are class labels.
        class_names, user_names: names for readers, by number; empty if they have none.
        mean, std: of images, the constants of `task.scale = "standard"`: mean and standard deviation of each channel
            over all training images (of the population; bytes count as pixel / 255); empty if they are not known.
    """

    train: Examples
    test: Examples
    classes: int
    users: Tensor | None = None
    test_users: Tensor | None = None
    note: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    loss: str = "cross-entropy"
    metrics: tuple[str, ...] = ()
    objective: str = ""
    class_names: tuple[str, ...] = ()
    user_names: tuple[str, ...] = ()

    @classmethod
    def by_user(cls, train: Examples, test: Examples, classes: int, owners: Sequence[Any], **more: Any) -> Source:
        """A dataset from the users of its training and test examples (`owners`): texts or numbers, None for none."""
        texts = [None if part is None else [str(one) for one in part] for part in owners]
        names = numbered(one for part in texts for one in part or ())
        users, test_users = (None if part is None else positions(part, names) for part in texts)
        return cls(train, test, classes, users, test_users, user_names=names, **more)


def numbered(texts: Iterable[str]) -> tuple[str, ...]:
    """The different texts in order: as numbers if all are whole numbers, otherwise alphabetical.

    >>> numbered(["10", "9", "10"]), numbered(["b", "10", "9"])
    (('9', '10'), ('10', '9', 'b'))
    """
    found = sorted(set(texts))
    if all(text.isascii() and text.isdigit() and len(text) < 20 for text in found):
        found.sort(key=int)
    return tuple(found)


def positions(texts: Iterable[str], names: Sequence[str]) -> Tensor:
    """(texts,) int64, the position of each text in a list of names.

    >>> positions(["b", "a", "b"], ("a", "b"))
    tensor([1, 0, 1])
    """
    at = {name: i for i, name in enumerate(names)}
    return torch.tensor([at[text] for text in texts], dtype=torch.int64)


# -- standardized images ---------------------------------------------------------------------------------------------

_MIN_STD = 1e-6  # of a channel that is constant


def image_values(examples: Examples) -> Tensor | None:
    """(n, channels, height, width) the stored values of images, bytes or floats; None for other examples."""
    if isinstance(examples, Images):
        return examples.pixels
    stored = examples.inputs if isinstance(examples, Arrays) else None
    return stored if isinstance(stored, Tensor) and stored.dim() == 4 and stored.is_floating_point() else None


def mean_and_std(values: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (of the population) of each channel.

    Args:
        values: (n, channels, height, width) images; bytes count as pixel / 255.

    >>> mean_and_std(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    rows = values.transpose(0, 1).flatten(1)
    if values.dtype == torch.uint8:
        # from counts of the 256 values: exact, and without a float copy of all images
        counts = torch.stack([torch.bincount(channel, minlength=256) for channel in rows])
        levels = torch.arange(256)
        total, squares = (counts * levels).sum(1).double() / 255, (counts * levels**2).sum(1).double() / 255**2
    else:
        wide = rows.double()
        total, squares = wide.sum(1), wide.square().sum(1)
    mean, square = total / rows.shape[1], squares / rows.shape[1]
    std = (square - mean * mean).clamp(min=0).sqrt().clamp(min=_MIN_STD)
    return tuple(mean.tolist()), tuple(std.tolist())


def standardized(examples: Examples, mean: Sequence[float], std: Sequence[float]) -> Examples:
    """Images with (x - mean) / std per channel; examples that are no images (`image_values`) stay as they are.

    >>> images = Arrays(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.zeros(2))
    >>> standardized(images, (0.5,), (0.5,)).inputs.flatten().tolist()
    [-1.0, 1.0]
    """
    if isinstance(examples, Images):
        return replace(examples, mean=tuple(mean), std=tuple(std))
    if not isinstance(examples, Arrays) or (values := image_values(examples)) is None:
        return examples
    shift, divisor = (torch.tensor(one, dtype=values.dtype).view(-1, 1, 1) for one in (mean, std))
    return replace(examples, inputs=(values - shift) / divisor)
