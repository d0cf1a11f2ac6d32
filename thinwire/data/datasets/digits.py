"""The digits that come with scikit-learn: 1,797 real images of 8x8 without a download. The default task."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.examples import Arrays, Source


@register(
    "dataset",
    "digits",
    doc="1,797 handwritten digits of 8x8 from scikit-learn; needs no files.",
    paper="Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository, 1998",
)
def digits(data_dir: Path | None = None) -> Source:
    """Handwritten digits, with 17 gray levels scaled to [0, 1]; no files are needed.

    A fifth of the examples of each class, drawn with a constant seed, is the test set.

    >>> source = digits()
    >>> len(source.train), len(source.test), source.classes
    (1438, 359, 10)
    """
    table = _table()
    labels = table[:, -1].astype(np.int64)
    test = np.zeros(len(labels), bool)
    for k in range(10):
        members = np.flatnonzero(labels == k)
        shuffled = members[Key(0).fold("digits", k).permutation(len(members)).numpy()]
        test[shuffled[: round(len(members) / 5)]] = True
    inputs = torch.from_numpy((table[:, :-1] / 16).astype(np.float32)).view(-1, 1, 8, 8)  # multiples of 1/16: exact
    targets, train = torch.from_numpy(labels), torch.from_numpy(~test)
    parts = [Arrays(inputs[which], targets[which]) for which in (train, ~train)]
    return Source(parts[0], parts[1], classes=10, mean=(0.30538223,), std=(0.37601014,))


def _table() -> np.ndarray:
    """(1797, 65) the pixels and the class of each image."""
    package = find_spec("sklearn")
    for place in package.submodule_search_locations or () if package else ():
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():  # read directly: importing scikit-learn takes longer than training on its digits
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack((bunch.data, bunch.target))
