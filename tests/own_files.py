"""Files as people have them, from the data of scikit-learn: CSV tables and folders of images."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn import datasets


def write_csv(path: Path, columns: dict[str, Any]) -> Path:
    """Write columns as a CSV file."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def bunch_columns(name: str, **more: Any) -> dict[str, Any]:
    """The columns of a dataset of scikit-learn; classes by name, in the column `label`."""
    bunch = getattr(datasets, f"load_{name}")()
    names = getattr(bunch, "target_names", None)
    label = bunch.target.tolist() if names is None else [str(names[y]) for y in bunch.target]
    columns = {feature: bunch.data[:, i].tolist() for i, feature in enumerate(bunch.feature_names)}
    return {**columns, **{key: make(len(label)) for key, make in more.items()}, "label": label}


def hospitals(rows: int) -> list[str]:
    """Five hospitals of different sizes."""
    return [f"hospital {i * i % 5 if i % 3 else 4}" for i in range(rows)]


def write_digits(folder: Path, images: int = 200, clients: int = 0, split: bool = False) -> Path:
    """Folders of 8x8 PNG images: [train|test]/[client]/class/number.png."""
    bunch = datasets.load_digits()
    for i in range(images):
        inner = folder
        if split:
            inner = inner / ("test" if i % 5 == 4 else "train")
        if clients:
            inner = inner / f"phone {i % clients}"
        inner = inner / f"digit {bunch.target[i]}"
        inner.mkdir(parents=True, exist_ok=True)
        Image.fromarray((bunch.images[i] * 15).astype(np.uint8)).save(inner / f"{i}.png")
    return folder
