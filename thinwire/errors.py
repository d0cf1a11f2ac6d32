"""Everything that thinwire raises on purpose.

    ThinwireError
    ├── ConfigError            a setting, name or file that the user gave cannot be used
    │   └── UnknownName        ... because nothing of that name exists (says the nearest)
    ├── IncompatibleParts      two parts of a method cannot work together (says what to write instead)
    ├── DataError              a data file is missing, truncated or not what its format says
    ├── WireError              bytes from the wire are refused: corrupt, too long, for another method
    ├── Drifted                a client's public state is no longer the server's; it asks for the whole state
    ├── CheckpointError        a run directory or checkpoint is damaged or belongs to another run
    └── Diverged               training produced a number that is not finite

The command line prints the message of any of them as one line and exits with 2, or with 3 where training failed:
`Diverged`, and a run that finished but collapsed or never got above chance (`thinwire/experiments/collapse.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ThinwireError(Exception):
    """Root of all errors raised on purpose: one line that says what to do."""


class ConfigError(ThinwireError):
    """A setting, name or file that the user gave cannot be used."""


class UnknownName(ConfigError):
    """A name that does not exist; the message lists the nearest ones.

    >>> str(UnknownName("method", "fedavgg", ["fedavg", "mapo"]))
    "unknown method 'fedavgg': did you mean 'fedavg'? Known: fedavg, mapo"
    """

    def __init__(self, what: str, given: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
        guess = f" did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(names) if names else "none"
        super().__init__(f"unknown {what} {given!r}:{guess} Known: {listed}{hint}")


class IncompatibleParts(ThinwireError):
    """Two parts of a method cannot work together."""


class DataError(ThinwireError):
    """A data file is missing, truncated, or not what its format says."""


class WireError(ThinwireError):
    """Bytes from the wire are refused."""


class Drifted(ThinwireError):
    """A client's public state is no longer the server's."""


class CheckpointError(ThinwireError):
    """A run directory or a checkpoint is damaged, or belongs to another run."""


class Diverged(ThinwireError):
    """Training produced a number that is not finite."""
