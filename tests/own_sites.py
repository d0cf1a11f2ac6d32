"""Folders of sites with records of their own, for tests: different sizes, a class that one site lacks, empty cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.own_files import write_csv

SIZES = {"north": 90, "south": 47, "west": 20}


def write_stays(folder: Path) -> Path:
    """The folders of three hospitals with the table of docs/own-data.md; `west` has no long stays."""
    rng = np.random.default_rng(5)
    for name, rows in SIZES.items():
        age, pulse, ward = rng.uniform(20, 95, rows), rng.normal(80, 12, rows), rng.choice(["A", "B", "D"], rows)
        score = (age - 60) / 20 + (pulse - 80) / 12 + 0.3 * rng.normal(size=rows)
        stay = np.array(["short", "medium", "long"])[np.digitize(score, (-0.6, 0.6))]
        if name == "west":
            stay = np.where(stay == "long", "medium", stay)
        cells = ["" if missing else f"{x:.1f}" for x, missing in zip(pulse, rng.random(rows) < 0.1, strict=True)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        columns = {"id": range(rows), "age": age.round(1).tolist(), "pulse": cells, "ward": ward, "stay": stay}
        write_csv(folder / name / "stays.csv", columns)
    return folder
