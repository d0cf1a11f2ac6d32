"""A federated method: one answer to each question of a round, side by side, and nothing else.

>>> Method() == Method(client_opt=SGD(0.1))      # FedAvg
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import torch

from thinwire.aggregators.base import Mean, WeightedMean
from thinwire.aggregators.client_weight import BySamples, Weigh
from thinwire.codecs.base import Codec, Raw
from thinwire.codecs.sparse import Threshold
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.masks.masks import Mask, NoMask
from thinwire.optimizers.base import Correction, Optimiser
from thinwire.optimizers.corrections import NoCorrection
from thinwire.optimizers.lr_schedules import Constant, Rate, at_rate
from thinwire.optimizers.penalties import NoPenalty, Penalty
from thinwire.optimizers.sgd import SGD
from thinwire.privacy.base import NoPrivacy, Privacy
from thinwire.protocol.budget import Budget
from thinwire.protocol.stage import Stage
from thinwire.schedules.base import Every, Schedule
from thinwire.sketches.base import Identity, Sketch
from thinwire.spaces.base import Space
from thinwire.spaces.full import Full

Link = Literal["ledger", "snapshot"]
Say = Literal["delta", "value"]
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
        settle: the codec through which coordinates go when their frame ends. What it loses is lost for everybody
            alike, and a client that missed the window downloads the short form.
        link: `ledger`: clients keep the public state and receive what was added since they were last here;
            `snapshot`: clients keep nothing and receive the coordinates, through `down`, every time.
        say: whether clients send their change or their value.
        weigh: how much a client counts in the mean.
        mean: how the server puts together what clients said. Clients need not know it.
        norm_bound: the largest norm of a client's change, report or buffers that counts, in multiples of the median
            client of the cohort; 0 for no bound. Clients need not know it. Under `privacy` that bounds clients itself
            there is no other bound.
        client_opt: moves the coordinates on a client.
        server_opt: moves them on the server; its gradient is the negated mean change.
        rate: how the client's step size changes from round to round.
        server_rate: the same for the server's.
        correction: bends local steps.
        penalty: is added to the loss of local steps.
        privacy: what may leave a client.
        guard: on link `ledger`, whether messages down let clients find out that their public state has come apart from
            the server's; six bytes a message.
        mask: which numbers are trained, and which are left at all.
        budget: which clients have other codecs than `up` and `down`.
        evaluate: whose coordinates the model is made of that is tested and kept: the `server`'s, or those that a
            `client` receives through `down` (link `snapshot`; on a ledger they are the same).
        secure: add up what clients say under masks that cancel, so that the server sees the sum only.
        then: what is different after some rounds (link `snapshot`).
    """

    space: Space = Full()
    sketch: Sketch = Identity()
    schedule: Schedule = Every()
    up: Codec = Raw()
    down: Codec = Raw()
    settle: Codec = Raw()
    link: Link = "ledger"
    say: Say = "delta"
    weigh: Weigh = BySamples()
    mean: Mean = field(default=WeightedMean(), repr=False)  # so that it is no part of the schema
    norm_bound: float = field(default=NORM_BOUND, repr=False)  # no message depends on it
    client_opt: Optimiser = SGD(0.1)
    server_opt: Optimiser = SGD(1.0)
    rate: Rate = Constant()
    server_rate: Rate = Constant()
    correction: Correction = NoCorrection()
    penalty: Penalty = NoPenalty()
    privacy: Privacy = NoPrivacy()
    guard: bool = True
    mask: Mask = field(default=NoMask(), repr=False)  # the schema of messages holds it where there is one
    budget: Budget = Budget()
    evaluate: Evaluate = field(default="server", repr=False)  # no message depends on it
    secure: bool = False
    then: Stage | None = field(default=None, repr=False)  # the schema of messages holds it where there is one

    def __post_init__(self) -> None:
        if self.link not in get_args(Link):
            raise ConfigError(f"link must be one of {', '.join(get_args(Link))}, not {self.link!r}")
        if self.say not in get_args(Say):
            raise ConfigError(f"say must be one of {', '.join(get_args(Say))}, not {self.say!r}")
        if not (self.norm_bound == 0 or 1 <= self.norm_bound < math.inf):
            raise ConfigError(f"norm_bound must be 0 (no bound) or 1 and more, not {self.norm_bound}")
        if self.evaluate not in get_args(Evaluate):
            raise ConfigError(f"evaluate must be one of {', '.join(get_args(Evaluate))}, not {self.evaluate!r}")

    def client_opt_at(self, version: int) -> Optimiser:
        """What moves the coordinates on a client in the round from `version`."""
        return at_rate(self.client_opt, self.rate, version)

    def server_opt_at(self, version: int) -> Optimiser:
        """What moves them on the server in the round from `version`."""
        return at_rate(self.server_opt, self.server_rate, version)

    @property
    def later(self) -> Method:
        """The method of the second stage, or itself if there is none."""
        if self.then is None:
            return self
        names = (field.name for field in fields(self.then) if field.name != "at")
        other = {name: part for name in names if (part := getattr(self.then, name)) is not None}
        return replace(self, then=None, **other)

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
        if not isinstance(self.settle, Raw):
            if not self.space.fresh_every:
                raise IncompatibleParts(
                    f"settle = {self.settle!r} is used when a frame ends, but {self.space!r} keeps its coordinates for "
                    "ever. Write settle = 'raw', or fresh_every = 10"
                )
            if self.settle.init(Spec.of(probe)):
                raise IncompatibleParts(
                    f"settle = {self.settle!r} remembers what it left out, but every frame ends once. "
                    "Take a codec without memory"
                )
        if self.space.fresh_every and self.link == "snapshot":
            raise IncompatibleParts(
                f"{self.space!r} merges its coordinates away, so link = 'snapshot' does not say all there is to know. "
                "Write link = 'ledger', or keep the frame (fresh_every = 0)"
            )
        if self.link == "ledger" and any(down != self.down for down in self.downs):
            raise IncompatibleParts(
                "tiers of the budget have different down codecs, but on link = 'ledger' everybody replays the same "
                "entries. Write link = 'snapshot', or leave down out of the tiers"
            )
        if self.link == "snapshot" and (deaf := [down for down in self.downs if down.init(Spec.of(probe))]):
            raise IncompatibleParts(
                f"{deaf[0]!r} remembers what it could not say, but on link = 'snapshot' every message stands for "
                "itself. Write link = 'ledger', or take a down codec without memory"
            )
        if self.space.fresh_every and remembers:
            raise IncompatibleParts(
                f"{c!r} remembers coordinates between rounds, but {self.space!r} redraws them. "
                "Write fresh_every = 0, or take a correction without memory"
            )
        if rescales and self.say == "value":
            raise IncompatibleParts(
                f"{c!r} scales what clients changed, so say = 'value' has no meaning under it. Write say = 'delta'"
            )
        if not isinstance(self.mask, NoMask):
            self._check_mask(sketched)
        if self.then is not None:
            self._check_stages(remembers)
        if self.mean.clips and self.say == "value":
            raise IncompatibleParts(
                f"{self.mean!r} shortens changes, but with say = 'value' clients send none. Write say = 'delta'"
            )
        if self.mean != WeightedMean() and self.secure:
            raise IncompatibleParts(
                f"secure = true shows the server a sum, but {self.mean!r} must see what each client said. "
                "Write mean = 'weighted', or secure = false"
            )
        if self.mean != WeightedMean() and not isinstance(self.privacy, NoPrivacy):
            raise IncompatibleParts(
                f"{self.privacy!r} is made for the plain mean, and nothing is known of its noise under {self.mean!r}. "
                "Write mean = 'weighted', or privacy = 'none'"
            )
        for opt, rate in ((self.client_opt, self.rate), (self.server_opt, self.server_rate)):
            if rate != Constant() and not (is_dataclass(opt) and any(f.name == "lr" for f in fields(opt))):
                raise IncompatibleParts(
                    f"{rate!r} changes lr from round to round, but {opt!r} has no setting of that name. "
                    "Write rate = 'constant'"
                )
        if sketched and self.say == "value":
            raise IncompatibleParts(
                f"{self.sketch!r} codes changes, so say = 'value' has no meaning under it. Write say = 'delta'"
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
            (self.say == "value", "say = 'value'", "what is masked would be averaged as zero", "say = 'delta'"),
            (self.space.fresh_every, self.space, "coordinates begin anew", "fresh_every = 0"),
            (not self.schedule.resamples(1), self.schedule, "blocks wait at home", "schedule = 'every'"),
            (
                self.mask.prunes and self.link == "ledger" and self.down not in (Raw(), Threshold(0.0)),
                f"down = {self.down!r} on link = 'ledger'",
                "zeros do not arrive as zeros",
                "down = 'raw' or link = 'snapshot'",
            ),
        ):
            if clash:
                raise IncompatibleParts(f"{self.mask!r} masks coordinates, but with {part!s} {why}. Write {instead}")

    def _check_stages(self, remembers: bool) -> None:
        """The first coordinates end with their stage: nothing may be remembered of them, and all are sent."""
        later = self.later
        for clash, part, why, instead in (
            (self.link == "ledger", "link = 'ledger'", "it replays what was added to them", "link = 'snapshot'"),
            (self.space.fresh_every, self.space, "it merges them into the base", "fresh_every = 0"),
            (later.space.fresh_every, later.space, "it merges them into the base", "fresh_every = 0"),
            (remembers, self.correction, "it remembers them", "correction = 'none'"),
            (not hasattr(later.space, "adopt"), later.space, "it cannot begin at given weights", "space = 'lora'"),
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
