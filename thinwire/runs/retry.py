"""Going back when training fails: to the newest checkpoint, with half the client learning rate.

    fails        a value is not finite (`Diverged`), or accuracy or loss collapses (`Verdict.too_fast`)
    checkpoints  states that an evaluation found healthy, `checkpoint.every` rounds apart; before the first, the start
    then         factor of the learning rate = schedule(t) * 0.5^(number of retries from version t or before)

The rates are a function of the version (`HalvedLR`), a warm-up does not start again, and clients go back to their own
states of that round. Abandoned rounds are left out of the records; their bytes are in `bytes_abandoned` of the record
that follows, so that sums over records are what was sent. `retries.json` lists the retries.
A process that is killed at any moment and resumed goes on with the same bits.

A deployment goes back otherwise (`Unfit`): to the state before a round in which clients were far off, with the same
learning rate, and without these clients for some rounds. `thinwire resume --from` goes back by hand (`roll_back`).
Clients of a deployment that are ahead of the server receive the whole state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.engine import Engine
from thinwire.optimizers.lr_schedules import HalvedLR
from thinwire.protocol.method import Method
from thinwire.runs.files import locked, read_checked
from thinwire.runs.records import ROLLED_BACK as ROLLED_BACK, rounds_in
from thinwire.runs.run_directory import RETRIES, RunFolder

MAX_RETRIES = 5
MAX_ROLLBACKS = 20


class Retry(NamedTuple):
    """One time that a run went back."""

    round: int  # the round that failed
    status: str  # `diverged`, `collapsed` or `at chance`; or `rolled back`: in a deployment, or by hand
    why: str
    from_round: int  # rounds done in the state that it went back to
    from_version: int
    lr: float  # the client learning rate from there on
    bytes_abandoned: int  # of the abandoned rounds, with what the failed one sent
    left_out: Sequence[int] = ()  # clients of a deployment that are left out of the next cohorts

    @property
    def halves(self) -> bool:
        """Whether the learning rate is halved from there on."""
        return self.status != ROLLED_BACK

    @property
    def text(self) -> str:
        """What happened, in one line."""
        back = f"round {self.from_round}" if self.from_round else "the start"
        return f"round {self.round} {self.status}: {self.why}; back to {back} with learning rate {self.lr:.4g}"


def read_retries(path: Path) -> list[Retry]:
    """The retries of a run directory; empty if it never went back."""
    file = path / RETRIES
    if not file.is_file():
        return []
    try:
        return [Retry(**one) for one in read_checked(file)["retries"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} holds no retries that this version reads; `--overwrite` runs from the start"
        ) from error


def bytes_of(records: Iterable[Mapping[str, Any]]) -> int:
    """The bytes that were sent in some rounds."""
    return sum(one[f"bytes_{way}"] for one in records for way in ("up", "down", "catchup"))


def halved(method: Method, at: Sequence[int]) -> Method:
    """The method with a client learning rate that is halved from each of these versions on.

    >>> halved(Method(), (0, 20)).lr_schedule.factor(20)
    0.25
    """
    return method.replace(lr_schedule=HalvedLR(tuple(at), method.lr_schedule)) if at else method


def check_retry(method: Method, engine: Engine) -> None:
    """Refuse what cannot go back."""
    opt, asked = method.client_opt, "on_divergence = 'retry'"
    if not dataclasses.is_dataclass(opt) or not any(part.name == "lr" for part in dataclasses.fields(opt)):
        raise ConfigError(f"{asked} halves the learning rate, but {opt!r} has no setting lr; write 'stop'")
    if method.privacy.active:
        raise ConfigError(f"{asked} would not count the privacy that abandoned rounds spend; write 'stop'")
    if engine.workers:
        raise ConfigError(f"{asked} cannot start the processes of engine.workers again; write workers = 0")
    if method.penalty.active and engine.device != "cpu" and engine.backend in ("auto", "graph"):
        raise ConfigError(
            f"{asked} changes the learning rate, which a CUDA graph with a penalty cannot; write backend = 'vmap'"
        )


def roll_back(path: Path, number: int) -> Retry:
    """Go back to the checkpoint of a round; nothing is changed if there is none. A finished run is unfinished again.

    Args:
        path: the run directory.
        number: the round; 0 for the start.
    """
    folder = RunFolder.open(path)
    with locked(path):
        newest, rounds = folder.load("cpu"), rounds_in(folder.checkpoints)
        if number not in (0, *rounds):
            listed = ", ".join(map(str, rounds[:10])) or "none"
            raise CheckpointError(
                f"{path} has no checkpoint of round {number}; it has {listed}: name one of them, and keep more of them "
                "with --set checkpoint.keep=20"
            )
        if newest is None or number == newest.state.round:
            raise CheckpointError(f"{path} is at round {number}, there is nothing to go back from")
        if folder.table.get("method", {}).get("privacy", {}).get("kind", "none") != "none":
            raise ConfigError(f"{path} has differential privacy, which rounds that are given up spend, too")
        start = folder.load("cpu", number) if number else None
        retries, version = read_retries(path), start.state.server.public.version if start else 0
        records = newest.lines
        lost, lr = bytes_of(records[number:]), records[number].get("lr") or 0.0
        retries.append(Retry(len(records), ROLLED_BACK, "rolled back by hand", number, version, lr, lost))
        folder.clear_results()
        folder.go_back(number, retries)
        folder.rewind(start, len(retries))
    return retries[-1]
