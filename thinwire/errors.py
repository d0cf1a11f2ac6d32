"""The errors that thinwire raises.

    ThinwireError
    ├── ConfigError            a setting, name or file of the user is invalid
    │   └── UnknownName        no part, preset or option has this name; the message suggests the nearest name
    ├── IncompatibleParts      two parts of a method cannot be combined; the message suggests an alternative
    ├── DataError              a data file is missing, truncated or malformed
    ├── WireError              a message is refused: damaged, too long, or of another method
    ├── Drifted                the public state of a client differs from the server's; the client requests a full state
    ├── CheckpointError        a run directory or checkpoint is damaged or belongs to another run
    │   └── InUse              another process writes to the run directory
    └── Diverged               training produced a non-finite value
        └── Unfit              the next state of a deployment is not fit, by clients that can be left out

The command line prints the message on one line and exits with status 2, or with status 3 if training failed:
`Diverged`, or a run whose accuracy collapsed or never exceeded chance (`thinwire/runs/collapse.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class ThinwireError(Exception):
    """Base class of all errors; the message is one line and suggests what to write."""


class ConfigError(ThinwireError):
    """A setting, name or file of the user is invalid."""


class UnknownName(ConfigError):
    """No part, preset or option has this name; the message suggests the nearest name and lists all.

    Args:
        what: the kind of name, for example `method`.
        given: the unknown name.
        known: all valid names.
        hint: appended to the message.

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
    """Two parts of a method cannot be combined."""


class DataError(ThinwireError):
    """A data file is missing, truncated or malformed."""


class WireError(ThinwireError):
    """A message is refused: it is damaged, too long, or of another method."""


class Drifted(ThinwireError):
    """The public state of a client differs from the server's."""


class CheckpointError(ThinwireError):
    """A run directory or checkpoint is damaged or belongs to another run."""


class InUse(CheckpointError):
    """Another process writes to the run directory."""


class Diverged(ThinwireError):
    """Training produced a non-finite value.

    Args:
        message: what is not finite.
        sent: bytes of the round until then: uploads, downloads, and downloads for catching up.
    """

    def __init__(self, message: str, sent: tuple[int, int, int] = (0, 0, 0)) -> None:
        super().__init__(message)
        self.sent = sent


class Unfit(Diverged):
    """The next state of a deployment is not fit, because of uploads far off; the run goes back and leaves them out.

    Args:
        message: what is not fit.
        far: the clients whose uploads were far off, with the reason.
        sent: as for `Diverged`.
        back_to: rounds done in the state to go back to; None for the state before this round.
    """

    def __init__(
        self,
        message: str,
        far: Mapping[int, str],
        sent: tuple[int, int, int] = (0, 0, 0),
        back_to: int | None = None,
    ) -> None:
        super().__init__(message, sent)
        self.far, self.back_to = dict(far), back_to
