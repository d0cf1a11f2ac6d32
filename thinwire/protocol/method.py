"""A federated method: one part for each decision of a round; and its tiers, its second stage, asynchronous rounds.

>>> Method() == Method(client_opt=SGD(0.1))
True
>>> Method().replace(upload="weights").upload
'weights'

The defaults are FedAvg. They are the only concrete parts that the protocol imports.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from thinwire.aggregators.base import Aggregator, BySamples, ClientWeight, WeightedMean
from thinwire.codecs.base import Codec, Raw
from thinwire.core.key import Key
from thinwire.core.registry import SLOTS, entries, lookup
from thinwire.core.text import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveInt, check_settings
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask, NoMask
from thinwire.optimizers.base import SGD, Correction, Optimizer
from thinwire.optimizers.corrections import NoCorrection
from thinwire.optimizers.lr_schedules import ConstantLR, LRSchedule
from thinwire.optimizers.penalties import NoPenalty, Penalty
from thinwire.privacy.base import NoPrivacy, Privacy
from thinwire.schedules.base import AllBlocks, Schedule
from thinwire.sketches.base import Identity, Sketch
from thinwire.spaces.base import Full, Space

Download = Literal["incremental", "full"]
UploadKind = Literal["delta", "weights"]
Evaluate = Literal["server", "client", "average"]
OptLifetime = Literal["round", "window", "run"]
OptOwner = Literal["client", "place"]
NORM_BOUND = 3.0  # see `Method.norm_bound`
EMA_DECAY = 0.95  # see `Method.ema_decay`


@dataclass(frozen=True)
class Tier:
    """Clients with the same codecs: a density, a number of bits, a rank.

    Args:
        share: how likely a client belongs to this tier, in proportion to the other tiers' shares.
        sampled: whether these clients ever take part; without them a cohort is drawn from the others.
        up: the codec of their uploads; None for the method's.
        down: the codec of downloads to them (full downloads only); None for the method's.
    """

    share: float = 1.0
    sampled: bool = field(default=True, repr=False)  # no message depends on it
    up: Codec | None = None
    down: Codec | None = None


@dataclass(frozen=True)
class Budget:
    """The tier of each client, known to both ends without a message. Without tiers all clients have the same codecs.

        tier(i) = clients[i] where that is given, else drawn once for the whole run with P(tier) = share / sum of shares

    Args:
        tiers: the tiers. In a file: `budget = { tiers = [{ share = 0.5, up = { kind = "topk", density = 0.01 } },
            { share = 0.5 }] }`.
        clients: the tier of each client, by client number; empty draws them from the seed.

    >>> from thinwire.codecs import TopK
    >>> budget = Budget((Tier(0.75, up=TopK(0.01)), Tier(0.25)))
    >>> drawn = [budget.tier(client, Key(0)) for client in range(1000)]
    >>> 700 < drawn.count(0) < 800, drawn == [budget.tier(client, Key(0)) for client in range(1000)]
    (True, True)
    >>> Budget(budget.tiers, clients=(1, 0)).tier(0, Key(0))
    1
    """

    tiers: tuple[Tier, ...] = ()
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for i, tier in enumerate(self.tiers):
            if not 0 < tier.share < float("inf"):
                raise ConfigError(f"the share of tier {i} must be above 0, not {tier.share}")
        if self.tiers and not any(tier.sampled for tier in self.tiers):
            raise ConfigError("no tier of the budget is sampled; remove sampled = false from one of them")
        if self.clients and not self.tiers:
            raise ConfigError("budget.clients gives clients a tier, but there are no budget.tiers")
        for client, own in enumerate(self.clients):
            if not 0 <= own < len(self.tiers):
                last = len(self.tiers) - 1
                raise ConfigError(f"budget.clients puts client {client} into tier {own}; write one from 0 to {last}")

    def check(self, clients: int) -> None:
        """Raise a ConfigError if the list of clients does not have the length of the task's."""
        if self.clients and len(self.clients) != clients:
            raise ConfigError(
                f"budget.clients gives {len(self.clients)} clients a tier, but the task has {clients}; give each one, "
                "or leave the list out to draw tiers by their shares"
            )

    def tier(self, client: int, key: Key) -> int:
        """The number of a client's tier."""
        if len(self.tiers) < 2:
            return 0
        if client < 0 or (self.clients and client >= len(self.clients)):
            raise ConfigError(f"client {client} has no tier; tiers are for the clients from 0 to the last of the task")
        if self.clients:
            return self.clients[client]
        at = float(key.fold(client).uniform(1)) * sum(tier.share for tier in self.tiers)
        for i, tier in enumerate(self.tiers):
            at -= tier.share
            if at < 0:
                return i
        return len(self.tiers) - 1  # a remainder of rounding


@dataclass(frozen=True)
class Stage:
    """The second stage of a method; parts that are None stay those of the method.

        version < at     coordinates of the first space
        version = at     coordinates of `space` closest to the weights then (`from_weights`), on the base of version 0
        version > at     trained with new optimizer states

    Args:
        at: number of rounds of the first stage.
        space: the space of the second stage; one that can start from given weights, such as `LoRA` or `Full`.
        mask: which parameters are trained.
        up: the codec of uploads.
        down: the codec of downloads.
        client_opt: the client optimizer.
        server_opt: the server optimizer.

    Nothing more is sent at the switch: with full downloads, which this needs, clients receive the coordinates of their
    stage in every round, and the base is that of version 0.

    >>> Stage(at=50).at
    50
    """

    at: PositiveInt = 50
    space: Space | None = None
    mask: Mask | None = None
    up: Codec | None = None
    down: Codec | None = None
    client_opt: Optimizer | None = None
    server_opt: Optimizer | None = None

    def __post_init__(self) -> None:
        check_settings(self, "next_stage.")


@dataclass(frozen=True)
class Asynchronous:
    """How rounds go on without slow clients. Without `concurrency`, a round waits for its whole cohort.

        asked at the start of a round    clients, until concurrency * cohort of them train at the same time
        end of a round                   when `cohort` uploads have arrived; the other clients go on training
        update of client i               (1 + tau_i)^-exponent * (its update),   tau_i = version now - version trained

    Args:
        concurrency: clients that train at the same time, in units of the cohort: 1 or more; 0 for synchronous rounds.
        exponent: how fast the weight of an update falls with its staleness tau; 0 for not at all.
        most_stale: the largest staleness of an upload that is used; 0 for any.

    >>> [round(Asynchronous(2.0).factor(staleness), 3) for staleness in (0, 1, 3)]
    [1.0, 0.707, 0.5]
    >>> Asynchronous(2.0).clients(10, 100), Asynchronous(2.0).clients(10, 15)
    (20, 15)
    """

    concurrency: NonNegativeFloat = 0.0
    exponent: NonNegativeFloat = 0.5
    most_stale: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_settings(self, "asynchronous.")
        if 0 < self.concurrency < 1:
            raise ConfigError(
                f"asynchronous.concurrency must be 0 (synchronous rounds) or 1 and more, in units of the cohort, "
                f"not {self.concurrency}; write for example 2.0"
            )

    @cached_property
    def active(self) -> bool:
        """Whether rounds are asynchronous."""
        return self.concurrency > 0

    def clients(self, cohort: int, eligible: int) -> int:
        """The number of clients that train at the same time."""
        return min(round(self.concurrency * cohort), eligible)

    def factor(self, staleness: int) -> float:
        """The factor of an update that is based on a version so many versions ago."""
        return float((1 + staleness) ** -self.exponent)

    def is_too_stale(self, staleness: int) -> bool:
        """Whether an upload is not used, because it is based on a version too long ago."""
        return 0 < self.most_stale < staleness


def _named(name: str, slot: str, kind: str) -> Any:
    """The part of a slot by the name of a method that sets it, or by its own."""
    method = entries("method").get(name)
    part = None if method is None else getattr(method.make(), slot)
    if part is None or part == getattr(Method, slot):
        part = lookup(kind, name).make()
    return part


@dataclass(frozen=True)
class Method:
    """Which parameters are trained, what is sent, when, and how it is aggregated. The defaults are FedAvg.

    Args:
        space: the coordinates that clients train, and how they expand to weights.
        sketch: what is averaged: the update itself, or a linear code of it.
        schedule: which blocks are synchronized in which round.
        up: the codec of uploads.
        down: the codec of downloads.
        merge_codec: encodes the coordinates when their basis is redrawn. Its loss is the same for everyone, and a
            client that missed the window downloads the short form. In a space that keeps its basis, `lattice-sum`
            encodes the sum of the entries that a client missed (`protocol/download.py`).
        download: `incremental`: clients keep the public state and receive what was added since their version; `full`:
            clients keep nothing and receive all coordinates, encoded by `down`, in every round.
        upload: whether clients send the change of the coordinates (`delta`) or the coordinates (`weights`).
        client_weight: the weight of a client in the mean.
        aggregator: aggregates the uploads. Clients need not know it.
        norm_bound: the largest norm of a client's update, report or buffers, as a multiple of the median client of the
            cohort; larger ones are scaled down; 0 for no bound. Clients need not know it. Not used where `privacy`
            bounds clients itself.
        client_opt: the client optimizer.
        opt_lifetime: how long a client keeps the state of its optimizer, such as momentum: for one `round`, for a
            `window` of the schedule (one round where the schedule has none), or for the `run`, from the round that it
            last took part in; a new basis or stage starts a new state.
        opt_owner: whose that state is. `client`: each client has its own. `place`: the first client of a cohort goes on
            with the state of the first client of the last cohort, the second with that of the second, and so on, as in
            programs in which some machines train the clients. A difference only where the state outlives a cohort, and
            only in a simulation: no message carries the state from client to client, so bytes do not count it.
        server_opt: the server optimizer; its gradient is the negated mean update.
        lr_schedule: the learning-rate schedule of the client optimizer, by round; see `over`.
        server_lr_schedule: the same of the server optimizer.
        correction: corrects local gradients or the mean update (FedProx, SCAFFOLD, FedDyn, FedNova).
        penalty: is added to the loss of local steps.
        privacy: the differential-privacy mechanism.
        drift_check: whether incremental downloads let clients detect that their public state is not the server's; six
            bytes a message.
        mask: which parameters are trained, and which are pruned.
        budget: tiers of clients with other codecs than `up` and `down`.
        evaluate: which model is evaluated and saved: the `server`'s, the one that a `client` receives through `down`
            (full downloads; with incremental ones they are the same), or the `average` of the server's models after
            each round, which costs no bytes (`federation/evaluation.py`).
        ema_decay: the weight of the earlier average: avg_t = m avg_{t-1} + (1 - m) w_t, m = min(ema_decay, 1 - 1/t).
        secure_aggregation: sum uploads under masks that cancel, so that the server learns only the sum.
        next_stage: what changes after some rounds (full downloads only).
        asynchronous: whether rounds go on without slow clients, whose uploads count later (FedBuff).

    A part may be given by name: that of a method that sets it (`thinwire list methods`), or its own.

    >>> Method(space="mapo", client_opt="adam").space.redraw_every
    1
    """

    space: Space = Full()
    sketch: Sketch = Identity()
    schedule: Schedule = AllBlocks()
    up: Codec = Raw()
    down: Codec = Raw()
    merge_codec: Codec = Raw()
    download: Download = "incremental"
    upload: UploadKind = "delta"
    client_weight: ClientWeight = BySamples()
    aggregator: Aggregator = field(default=WeightedMean(), repr=False)  # not part of the schema of messages
    norm_bound: NonNegativeFloat = field(default=NORM_BOUND, repr=False)  # no message depends on it
    client_opt: Optimizer = SGD(0.1)
    opt_lifetime: OptLifetime = field(default="window", repr=False)  # part of the schema where it is not the default
    opt_owner: OptOwner = field(default="client", repr=False)  # no message depends on it
    server_opt: Optimizer = SGD(1.0)
    lr_schedule: LRSchedule = ConstantLR()
    server_lr_schedule: LRSchedule = ConstantLR()
    correction: Correction = NoCorrection()
    penalty: Penalty = NoPenalty()
    privacy: Privacy = NoPrivacy()
    drift_check: bool = True
    mask: Mask = field(default=NoMask(), repr=False)  # part of the schema where there is one
    budget: Budget = Budget()
    evaluate: Evaluate = field(default="server", repr=False)  # no message depends on it
    ema_decay: BelowOne = field(default=EMA_DECAY, repr=False)  # no message depends on it
    secure_aggregation: bool = False
    next_stage: Stage | None = field(default=None, repr=False)  # part of the schema where there is one
    asynchronous: Asynchronous = field(default=Asynchronous(), repr=False)  # no message depends on it

    def __post_init__(self) -> None:
        for slot, kind in SLOTS.items():
            if isinstance(name := getattr(self, slot), str):
                object.__setattr__(self, slot, _named(name, slot, kind))
        check_settings(self)
        if 0 < self.norm_bound < 1:
            raise ConfigError(f"norm_bound must be 0 (no bound) or 1 and more, not {self.norm_bound}")

    def replace(self, **parts: Any) -> Method:
        """A copy with some parts replaced."""
        return replace(self, **parts)

    def over(self, rounds: int) -> Method:
        """The method of a run of that many rounds: fractions of it become counts, in schedules and in the space.

        >>> from thinwire.optimizers.lr_schedules import CosineLR
        >>> Method(lr_schedule=CosineLR(fraction=0.5)).over(200).lr_schedule.rounds
        100

        Server and clients make their contract from it. A second stage (`next_stage`) goes on with the same schedules.
        """
        return replace(
            self,
            space=self.space.over(rounds),
            lr_schedule=self.lr_schedule.over(rounds),
            server_lr_schedule=self.server_lr_schedule.over(rounds),
        )

    def for_model(self, module: nn.Module) -> Method:
        """The method with its spaces completed by the types of a model's layers (`Space.for_model`)."""
        stage = self.next_stage
        if stage is not None and stage.space is not None:
            stage = replace(stage, space=stage.space.for_model(module))
        return replace(self, space=self.space.for_model(module), next_stage=stage)

    @cached_property
    def sends_sums(self) -> bool:
        """Whether clients that missed rounds can be sent the sum of the missed entries (`protocol/download.py`)."""
        kept = self.download == "incremental" and not self.space.redraw_every
        return kept and self.sketch.is_identity and self.merge_codec.encodes_sums

    @property
    def later(self) -> Method:
        """The method of the second stage, or itself if there is none."""
        if self.next_stage is None:
            return self
        names = (part.name for part in fields(self.next_stage) if part.name != "at")
        other = {name: part for name in names if (part := getattr(self.next_stage, name)) is not None}
        return replace(self, next_stage=None, **other)

    @cached_property
    def ups(self) -> tuple[Codec, ...]:
        """The upload codec of each tier; one where there are no tiers."""
        return tuple(tier.up or self.up for tier in self.budget.tiers) or (self.up,)

    @cached_property
    def downs(self) -> tuple[Codec, ...]:
        """The download codec of each tier; one where there are no tiers."""
        return tuple(tier.down or self.down for tier in self.budget.tiers) or (self.down,)
