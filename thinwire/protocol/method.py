"""A federated method: one answer to each question of a round, side by side, and nothing else.

>>> Method() == Method(client_opt=SGD(0.1))      # FedAvg
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from thinwire.aggregators.base import Aggregator, WeightedMean
from thinwire.aggregators.client_weight import BySamples, ClientWeight
from thinwire.codecs.base import Codec, Raw
from thinwire.codecs.sparse import Threshold
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.masks.masks import Mask, NoMask
from thinwire.optimizers.base import Correction, Optimizer
from thinwire.optimizers.corrections import NoCorrection
from thinwire.optimizers.lr_schedules import ConstantLR, LRSchedule, at_lr_schedule
from thinwire.optimizers.penalties import NoPenalty, Penalty
from thinwire.optimizers.sgd import SGD
from thinwire.privacy.base import NoPrivacy, Privacy
from thinwire.protocol.budget import Budget
from thinwire.protocol.stage import Stage
from thinwire.schedules.base import AllBlocks, Schedule
from thinwire.sketches.base import Identity, Sketch
from thinwire.spaces.base import Space
from thinwire.spaces.full import Full

Download = Literal["incremental", "full"]
UploadKind = Literal["delta", "weights"]
Evaluate = Literal["server", "client"]
NORM_BOUND = 10.0  # see `Method.norm_bound`


@dataclass(frozen=True)
class Method:
    """What is trained, what is sent, when, and how it is put together again. The defaults are FedAvg.

    Args:
        space: where a client trains.
        sketch: which numbers are averaged.
        schedule: which blocks speak in which round.
        up: client's numbers to bytes.
        down: server's numbers to bytes.
        merge_codec: the codec through which coordinates go when their basis ends. What it loses is lost for everybody
            alike, and a client that missed the window downloads the short form.
        download: `ledger`: clients keep the public state and receive what was added since they were last here;
            `snapshot`: clients keep nothing and receive the coordinates, through `down`, every time.
        upload: whether clients send their change or their value.
        client_weight: how much a client counts in the mean.
        aggregator: how the server puts together what clients said. Clients need not know it.
        norm_bound: the largest norm of a client's change, report or buffers that counts, in multiples of the median
            client of the cohort; 0 for no bound. Clients need not know it. Under `privacy` that bounds clients itself
            there is no other bound.
        client_opt: moves the coordinates on a client.
        server_opt: moves them on the server; its gradient is the negated mean change.
        lr_schedule: how the client's step size changes from round to round.
        server_lr_schedule: the same for the server's.
        correction: bends local steps.
        penalty: is added to the loss of local steps.
        privacy: what may leave a client.
        drift_check: on `incremental` download, whether messages down let clients find out that their public state has come apart from
            the server's; six bytes a message.
        mask: which numbers are trained, and which are left at all.
        budget: which clients have other codecs than `up` and `down`.
        evaluate: whose coordinates the model is made of that is tested and kept: the `server`'s, or those that a
            `client` receives through `down` (`full` download; on a ledger they are the same).
        secure_aggregation: add up what clients say under masks that cancel, so that the server sees the sum only.
        next_stage: what is different after some rounds (`full` download).
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
    aggregator: Aggregator = field(default=WeightedMean(), repr=False)  # so that it is no part of the schema
    norm_bound: float = field(default=NORM_BOUND, repr=False)  # no message depends on it
    client_opt: Optimizer = SGD(0.1)
    server_opt: Optimizer = SGD(1.0)
    lr_schedule: LRSchedule = ConstantLR()
    server_lr_schedule: LRSchedule = ConstantLR()
    correction: Correction = NoCorrection()
    penalty: Penalty = NoPenalty()
    privacy: Privacy = NoPrivacy()
    drift_check: bool = True
    mask: Mask = field(default=NoMask(), repr=False)  # the schema of messages holds it where there is one
    budget: Budget = Budget()
    evaluate: Evaluate = field(default="server", repr=False)  # no message depends on it
    secure_aggregation: bool = False
    next_stage: Stage | None = field(default=None, repr=False)  # the schema of messages holds it where there is one

    def __post_init__(self) -> None:
        if self.download not in get_args(Download):
            raise ConfigError(f"link must be one of {', '.join(get_args(Download))}, not {self.download!r}")
        if self.upload not in get_args(UploadKind):
            raise ConfigError(f"say must be one of {', '.join(get_args(UploadKind))}, not {self.upload!r}")
        if not (self.norm_bound == 0 or 1 <= self.norm_bound < math.inf):
            raise ConfigError(f"norm_bound must be 0 (no bound) or 1 and more, not {self.norm_bound}")
        if self.evaluate not in get_args(Evaluate):
            raise ConfigError(f"evaluate must be one of {', '.join(get_args(Evaluate))}, not {self.evaluate!r}")

    def replace(self, **slots: Any) -> Method:
        """A copy with other values in some slots, as `dataclasses.replace`.

        >>> Method().replace(download="full").download
        'full'
        """
        return replace(self, **slots)

    def client_opt_at(self, version: int) -> Optimizer:
        """What moves the coordinates on a client in the round from `version`."""
        return at_lr_schedule(self.client_opt, self.lr_schedule, version)

    def server_opt_at(self, version: int) -> Optimizer:
        """What moves them on the server in the round from `version`."""
        return at_lr_schedule(self.server_opt, self.server_lr_schedule, version)

    @property
    def later(self) -> Method:
        """The method of the second stage, or itself if there is none."""
        if self.next_stage is None:
            return self
        names = (field.name for field in fields(self.next_stage) if field.name != "at")
        other = {name: part for name in names if (part := getattr(self.next_stage, name)) is not None}
        return replace(self, next_stage=None, **other)

    @cached_property
    def ups(self) -> tuple[Codec, ...]:
        """The up codec of each tier; one where all clients are alike."""
        return tuple(tier.up or self.up for tier in self.budget.tiers) or (self.up,)

    @cached_property
    def downs(self) -> tuple[Codec, ...]:
        """The down codec of each tier."""
        return tuple(tier.down or self.down for tier in self.budget.tiers) or (self.down,)

    def check(self, weights: Spec) -> None:
        """Raise IncompatibleParts, saying what to write instead, if the parts cannot work together on this model."""
        self.space.check(weights)
        probe: Tree = {"probe": torch.zeros(1)}
        c = self.correction
        remembers = bool(c.init_client(probe) or c.init_shared(probe) or c.init_server(probe))
        _, report = c.finish(probe, 2, 1.0, c.init_client(probe), c.init_shared(probe))
        rescales = c.factor(report) != 1.0
        sketched = not isinstance(self.sketch, Identity)
        if not isinstance(self.merge_codec, Raw):
            if not self.space.redraw_every:
                raise IncompatibleParts(
                    f"merge_codec = {self.merge_codec!r} is used when a basis ends, but {self.space!r} keeps its coordinates for "
                    "ever. Write merge_codec = 'raw', or redraw_every = 10"
                )
            if self.merge_codec.init(Spec.of(probe)):
                raise IncompatibleParts(
                    f"merge_codec = {self.merge_codec!r} remembers what it left out, but every basis ends once. "
                    "Take a codec without memory"
                )
        if self.space.redraw_every and self.download == "full":
            raise IncompatibleParts(
                f"{self.space!r} merges its coordinates away, so download = 'full' does not say all there is to know. "
                "Write download = 'incremental', or keep the basis (redraw_every = 0)"
            )
        if self.download == "incremental" and any(down != self.down for down in self.downs):
            raise IncompatibleParts(
                "tiers of the budget have different down codecs, but on download = 'incremental' everybody replays the same "
                "entries. Write download = 'full', or leave down out of the tiers"
            )
        if self.download == "full" and (deaf := [down for down in self.downs if down.init(Spec.of(probe))]):
            raise IncompatibleParts(
                f"{deaf[0]!r} remembers what it could not say, but on download = 'full' every message stands for "
                "itself. Write download = 'incremental', or take a down codec without memory"
            )
        if self.space.redraw_every and remembers:
            raise IncompatibleParts(
                f"{c!r} remembers coordinates between rounds, but {self.space!r} redraws them. "
                "Write redraw_every = 0, or take a correction without memory"
            )
        if rescales and self.upload == "weights":
            raise IncompatibleParts(
                f"{c!r} scales what clients changed, so upload = 'weights' has no meaning under it. Write upload = 'delta'"
            )
        if not isinstance(self.mask, NoMask):
            self._check_mask(sketched)
        if self.next_stage is not None:
            self._check_stages(remembers)
        if self.aggregator.clips and self.upload == "weights":
            raise IncompatibleParts(
                f"{self.aggregator!r} shortens changes, but with upload = 'weights' clients send none. Write upload = 'delta'"
            )
        if self.aggregator != WeightedMean() and self.secure_aggregation:
            raise IncompatibleParts(
                f"secure_aggregation = true shows the server a sum, but {self.aggregator!r} must see what each client said. "
                "Write aggregator = 'weighted', or secure_aggregation = false"
            )
        if self.aggregator != WeightedMean() and not isinstance(self.privacy, NoPrivacy):
            raise IncompatibleParts(
                f"{self.privacy!r} is made for the plain mean, and nothing is known of its noise under {self.aggregator!r}. "
                "Write aggregator = 'weighted', or privacy = 'none'"
            )
        for opt, rate in ((self.client_opt, self.lr_schedule), (self.server_opt, self.server_lr_schedule)):
            if rate != ConstantLR() and not (is_dataclass(opt) and any(f.name == "lr" for f in fields(opt))):
                raise IncompatibleParts(
                    f"{rate!r} changes lr from round to round, but {opt!r} has no setting of that name. "
                    "Write lr_schedule = 'constant'"
                )
        if sketched and self.upload == "weights":
            raise IncompatibleParts(
                f"{self.sketch!r} codes changes, so upload = 'weights' has no meaning under it. Write upload = 'delta'"
            )
        if sketched and self._server_opt_looks_at_coordinates():
            raise IncompatibleParts(
                f"{self.server_opt!r} decays coordinates on the server, but under {self.sketch!r} the server moves "
                "codes. Write weight_decay = 0 for the server, or take the identity sketch"
            )
        if sketched and c.init_server(probe):
            raise IncompatibleParts(
                f"{c!r} keeps server memory in coordinates, but under {self.sketch!r} the server sees codes only. "
                "Take the identity sketch, or a correction without server memory"
            )

    def _check_mask(self, sketched: bool) -> None:
        """A mask is of coordinates that stay, that the server moves itself, and that both ends know."""
        for clash, part, why, instead in (
            (sketched, self.sketch, "the server moves codes", "the identity sketch"),
            (
                self.upload == "weights",
                "upload = 'weights'",
                "what is masked would be averaged as zero",
                "upload = 'delta'",
            ),
            (self.space.redraw_every, self.space, "coordinates begin anew", "redraw_every = 0"),
            (not self.schedule.resamples(1), self.schedule, "blocks wait at home", "schedule = 'all-blocks'"),
            (
                self.mask.prunes and self.download == "incremental" and self.down not in (Raw(), Threshold(0.0)),
                f"down = {self.down!r} on download = 'incremental'",
                "zeros do not arrive as zeros",
                "down = 'raw' or download = 'full'",
            ),
        ):
            if clash:
                raise IncompatibleParts(f"{self.mask!r} masks coordinates, but with {part!s} {why}. Write {instead}")

    def _check_stages(self, remembers: bool) -> None:
        """The first coordinates end with their stage: nothing may be remembered of them, and all are sent."""
        later = self.later
        for clash, part, why, instead in (
            (
                self.download == "incremental",
                "download = 'incremental'",
                "it replays what was added to them",
                "download = 'full'",
            ),
            (self.space.redraw_every, self.space, "it merges them into the base", "redraw_every = 0"),
            (later.space.redraw_every, later.space, "it merges them into the base", "redraw_every = 0"),
            (remembers, self.correction, "it remembers them", "correction = 'none'"),
            (
                not hasattr(later.space, "from_weights"),
                later.space,
                "it cannot begin at given weights",
                "space = 'lora'",
            ),
            (getattr(later.space, "freeze_a", False), later.space, "its A is drawn", "freeze_a = false"),
            (later.mask.fixed, later.mask, "clients do not know what it keeps still", "mask = 'none'"),
        ):
            if clash:
                raise IncompatibleParts(
                    f"then gives up the coordinates of the first stage, but with {part!s} that cannot be: {why}. "
                    f"Write {instead}"
                )

    def _server_opt_looks_at_coordinates(self) -> bool:
        """Whether the same gradient is answered otherwise at another place."""
        grads: Tree = {"probe": torch.ones(1)}
        state = self.server_opt.init(grads)
        here, there = (self.server_opt.update(grads, state, {"probe": torch.full((1,), x)})[0] for x in (0.0, 1.0))
        return not torch.equal(here["probe"], there["probe"])
