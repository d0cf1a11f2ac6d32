"""Forecast of the bytes of a whole run without training: real cohorts and ledger, messages of known lengths.

The cohort of a round, and so the version that a returning client holds, depends only on the seed. The ledger and the
choice of the shortest download depend only on lengths. The forecast therefore runs all rounds with message bodies that
have a length and no contents. Two lengths depend on training: those of codecs with variable length, for which Gaussian
values are encoded, and those under a schedule such as FedLAMA, for which the forecast is a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from thinwire.codecs.base import Codec
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, add
from thinwire.protocol.advance import switch_stage
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.download import RoundOpening, has_drift_check
from thinwire.protocol.next_version import append_entry
from thinwire.protocol.setup import initial_server_state, plan_round
from thinwire.protocol.state import ServerState
from thinwire.schedules.base import Plan
from thinwire.schedules.lama import FedLAMA
from thinwire.secure.masks import hidden_size
from thinwire.simulation.simulation import Simulation
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes, varint
from thinwire.wire.weight import encode as encode_weight

MOST_SUMMED = 64  # rounds of a window that are drawn to estimate the length of their sum


class Forecast(NamedTuple):
    """The bytes of all messages of a run."""

    up: int
    down: int
    catchup: int

    @property
    def total(self) -> int:
        """Uploads, downloads and catch-up."""
        return self.up + self.down + self.catchup


class Blank:
    """A stand-in for bytes: it has a length and no contents."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def blank(size: int) -> Bytes:
    """A `Blank` typed as bytes, for functions that only use the length."""
    return cast("Bytes", Blank(size))


class Lengths:
    """Lengths of the parts of messages under a contract, cached."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._kept: dict[Any, int] = {}

    def payload(self, codec: Codec, spec: Spec) -> int:
        """Length of encoded values; for a codec with variable length, of Gaussian values."""
        if (size := codec.size(spec)) is not None:
            return size
        key = repr(codec), spec
        if key not in self._kept:
            draw = self.contract.key.fold("forecast")
            tree = {block.name: draw.fold(block.name).normal(*block.shape) for block in spec}
            peer = self.contract.peer(0, EVERYONE, self.contract.moving)
            self._kept[key] = len(codec.encode(tree, codec.init(spec), peer)[0])
        return self._kept[key]

    def snapshot(self, names: frozenset[str], rounds: int) -> int:
        """Length of the encoded coordinates after some rounds of a window; if it varies, of summed Gaussian steps."""
        method, spec = self.contract.method, self.contract.coords.restrict(names)
        codec = method.merge_codec
        if not codec.exact or codec.size(spec) is not None or not method.sketch.is_identity:
            return self.payload(codec, spec)
        key = names, min(rounds, MOST_SUMMED)
        if key not in self._kept:
            peer, state, total = (
                self.contract.peer(0, EVERYONE, self.contract.moving),
                method.down.init(spec),
                spec.zeros(),
            )
            for i in range(key[1]):
                draw = self.contract.key.fold("forecast", i)
                tree = {block.name: draw.fold(block.name).normal(*block.shape) for block in spec}
                data, state = method.down.encode(tree, state, peer)
                total = add(total, method.down.decode(data, spec, peer))
            self._kept[key] = len(codec.encode(total, {}, peer)[0])
        return self._kept[key]

    def body(self, names: frozenset[str], fields: Mapping[int, int]) -> int:
        """Length of a body with fields of these lengths."""
        return wire.body_length(names, fields, self.contract.schema)

    def entry(self, names: frozenset[str], clients: int) -> int:
        """Length of the ledger entry of one version, after a round with that many clients."""
        method = self.contract.method
        step = self.contract.step_of(self.contract.coords.restrict(names))
        fields = {wire.COORDS: self.payload(method.down, step)}
        if (stacking := method.space.stacking) is not None:
            count = stacking.count(clients)
            stack = stacking.stack_spec(self.contract.weights, count)
            fields[wire.STACK] = len(varint(count)) + (self.payload(method.down, stack) if stack.blocks else 0)
        return self.body(names, fields)

    def up(self, names: frozenset[str], tier: int, version: int, samples: int) -> int:
        """Length of the upload of a client of a tier with this number of examples."""
        weight = len(encode_weight(self.contract.method.client_weight.weight(samples)))
        if (names, tier, weight) not in self._kept:
            self._kept[names, tier, weight] = self._upload(names, tier, weight)
        return len(wire.pack(wire.UP, version, (), self.contract.schema)) + self._kept[names, tier, weight]

    def _upload(self, names: frozenset[str], tier: int, weight: int) -> int:
        contract, method = self.contract, self.contract.method
        planned = contract.coords.restrict(names)
        size = self.payload(method.ups[tier], method.sketch.spec(planned))
        fields = {wire.COORDS: hidden_size(size // 4) if method.secure_aggregation else size}
        if contract.buffers.blocks:
            fields[wire.BUFFERS] = contract.buffers.nbytes
        if method.client_weight.sent and not method.secure_aggregation:
            fields[wire.WEIGHT] = weight
        if contract.report.blocks:
            fields[wire.SHARED] = contract.report.nbytes
        if report := method.schedule.report(planned.shapes(), Plan(names)):
            fields[wire.REPORT] = Spec.of(report).nbytes
        return self.body(names, fields)

    def next_down(self, server: ServerState, plan: Plan, clients: int) -> int:
        """Length of the download after a round with this plan, for a client that took part in the round before."""
        body = cast("bytes", blank(self.entry(plan.names, clients)))
        end = None if self.contract.method.space.stacking is None else body  # a snapshot would not have the stack
        ledger = append_entry(self.contract, server.ledger, plan, body, end)
        later = server._replace(public=server.public._replace(version=server.public.version + 1), ledger=ledger)
        past = later.ledger.past_way(server.public.version) or ()
        return wire.length(ForecastOpening(self.contract, later, self).steps(server.public.version, past))

    @property
    def exact(self) -> bool:
        """Whether no length depends on the contents of messages."""
        method = self.contract.method
        downs = [(codec, self.contract.sendable) for codec in method.downs]
        if method.download == "incremental":
            downs = [(method.down, self.contract.step), (method.merge_codec, self.contract.coords)]
        ups = [(codec, self.contract.code) for codec in method.ups]
        return all(codec.size(spec) is not None for codec, spec in (*ups, *downs))


class ForecastOpening(RoundOpening):
    """The messages that open a round, as lengths; the shortest download is chosen as for real messages."""

    def __init__(self, contract: Contract, server: ServerState, lengths: Lengths) -> None:
        super().__init__(contract, server)
        self.lengths = lengths

    def steps(self, version: int, past: tuple[Bytes, ...]) -> wire.Pieces:
        """The download that replays ledger entries."""
        size = sum(map(len, self._bodies(version, past)))
        return self._message(wire.STEPS, size, self.server.public.version - version)

    def state(self, version: int, client: int) -> wire.Pieces:
        """The download of the whole state."""
        now, contract = self.server.public.version, self.contract
        if contract.method.download == "full":
            fields = {wire.COORDS: self.lengths.payload(contract.down(client), contract.sendable)}
        else:
            fields = {wire.COORDS: contract.sendable.nbytes}
            fields |= {wire.BASE: contract.weights.nbytes} if contract.window(now) else {}
        body = self.lengths.body(self.server.ledger.synced_since(version), fields)
        return self._message(wire.STATE, body + len(self._request(True)), now - version)

    def _message(self, kind: int, size: int, behind: int) -> wire.Pieces:
        return (wire.pack(kind, self.server.public.version, (), self.contract.schema, behind), blank(size))

    def _snapshot(self, touched: frozenset[str]) -> tuple[Bytes, ...]:
        method, ledger = self.contract.method, self.server.ledger
        size = self.contract.coords.restrict(touched).nbytes
        if method.merge_codec.exact and not method.sends_sums:  # with sums, the start is part of a snapshot
            size = self.lengths.snapshot(touched, ledger.version - ledger.opened)
        return (blank(self.lengths.body(touched, {wire.VALUES: size})),)

    def _sum(self, start: int) -> bytes | None:
        ledger, touched = self.server.ledger, self.server.ledger.synced_since(start)
        missed = ledger.version - start
        if not self.contract.method.sends_sums or ledger.since(start) is None or not 1 < missed <= wire.MAX_STEPS:
            return None
        return cast("bytes", blank(self.lengths.body(touched, {wire.SUM: self.lengths.snapshot(touched, missed)})))

    def _request(self, news: bool) -> bytes:
        contract = self.contract
        fields = {wire.SHARED: contract.shared.nbytes, wire.BUFFERS: contract.buffers.nbytes} if news else {}
        fields = {field: size for field, size in fields.items() if size}
        fields |= {wire.DRIFT_CHECK: 4} if has_drift_check(contract) else {}
        return cast("bytes", blank(self.lengths.body(self.names, fields)))


def forecast(simulation: Simulation, *, waiting: bool = False) -> Forecast:
    """The bytes of all rounds.

    Args:
        simulation: the job, ready to run.
        waiting: for FedLAMA: whether all layers wait after the first window (the fewest bytes), or none (the most).
    """
    whole, job = simulation.contract, simulation.job
    contract, server = whole, initial_server_state(whole, simulation.federation.first)
    lengths, versions, cohort = Lengths(contract), dict[int, int](), tuple[int, ...]()
    samples = job.task.clients.sizes()
    up = down = catchup = 0
    for version in range(job.rounds):
        if whole.at(version) is not contract:
            earlier, contract = contract, whole.at(version)
            server = initial_server_state(
                contract, switch_stage(earlier, contract, server.public._replace(version=version))
            )
            lengths = Lengths(contract)
        server = server._replace(
            public=server.public._replace(version=version), schedule=_schedule(contract, version, waiting)
        )
        plan = plan_round(whole, server)
        if plan.resample or not cohort:
            cohort = simulation.federation.sampler.cohort(version)
        opening = ForecastOpening(contract, server, lengths)
        messages = opening.messages({client: versions.get(client, 0) for client in cohort})
        ordinary, extra = opening.split([wire.length(pieces) for pieces in messages.values()])
        down, catchup = down + ordinary, catchup + extra
        up += sum(lengths.up(plan.names, contract.tier(client), version, int(samples[client])) for client in cohort)
        versions.update(dict.fromkeys(cohort, version))
        body, end = _entry(contract, lengths, plan.names, version, len(cohort))
        server = server._replace(ledger=append_entry(contract, server.ledger, plan, body, end))
    return Forecast(up, down, catchup)


def _entry(
    contract: Contract, lengths: Lengths, names: frozenset[str], version: int, clients: int
) -> tuple[bytes, bytes | None]:
    """The ledger entry of the round from a version, and the end of its window if the round ends one."""
    if contract.method.download == "full":
        return b"", None
    body = cast("bytes", blank(lengths.entry(names, clients)))
    if version + 1 != contract.window_end(version):
        return body, None
    values = lengths.snapshot(names, contract.method.space.redraw_every)
    end = cast("bytes", blank(lengths.body(names, {wire.VALUES: values})))
    if not contract.method.merge_codec.exact:
        return end, end
    return body, body if contract.method.space.redraw_every == 1 else end


def _schedule(contract: Contract, version: int, waiting: bool) -> Tree:
    """The state of a schedule before a round; for FedLAMA with all layers waiting, or none."""
    schedule = contract.method.schedule
    state = schedule.init(contract.coords)
    if not isinstance(schedule, FedLAMA) or version < schedule.phi:  # the first window synchronizes all layers
        return state
    return {"rounds": torch.tensor(version), "often": torch.full_like(state["often"], not waiting)}
