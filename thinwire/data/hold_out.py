"""A test set from a table or folder without one: a fraction of every client and every class, the same for all seeds.

    rows in order of client, then class, then at random;  row i is a test row if floor((i + 1) f) > floor(i f)

Every client keeps a training row. Randomness comes from a constant label and `seed`, not from the seed of a run, so
that runs of several seeds are tested on the same rows.

>>> users = np.repeat([0, 1], 10)
>>> test = held_out_rows(20, 0.2, users=users)
>>> np.bincount(users[test]).tolist()
[2, 2]
"""

from __future__ import annotations

import numpy as np

from thinwire.core.key import Key
from thinwire.errors import ConfigError, DataError


def held_out_rows(
    rows: int, fraction: float, users: np.ndarray | None = None, labels: np.ndarray | None = None, seed: int = 0
) -> np.ndarray:
    """(rows,) bool: the rows that are held out for testing.

    Args:
        rows: number of rows.
        fraction: of the rows, more than 0 and less than 1.
        users: (rows,) the client of each row, or None.
        labels: (rows,) the class of each row, or None.
        seed: of another random choice.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"task.test_fraction must be between 0 and 1, not {fraction}; write 0.2, or name a test file")
    order = Key(seed).fold("test rows").permutation(rows).numpy()
    for column in (labels, users):  # stable: the last sort is the outer one
        if column is not None:
            order = order[np.argsort(column[order], kind="stable")]
    steps = np.floor(np.arange(rows + 1) * fraction + 1e-9)
    test = np.zeros(rows, bool)
    test[order[np.diff(steps) > 0]] = True
    if users is not None:  # a client of which all rows are test rows gets one back
        _, first, group = np.unique(users, return_index=True, return_inverse=True)
        emptied = np.bincount(group, weights=~test, minlength=len(first)) == 0
        test[first[emptied]] = False
    if not test.any() or test.all():
        raise DataError(f"{rows} rows are too few for training and testing with task.test_fraction = {fraction}")
    return test
