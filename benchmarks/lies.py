"""Accuracy, refusals and names by lie, method and aggregation rule: one or two of eight clients lie in every round.

    python benchmarks/lies.py                              the default rule, one liar: every lie, every method
    python benchmarks/lies.py --rules median --liars 1 2 --methods fedavg
    python benchmarks/lies.py --quick                      a few of them, as a test

FedAvg and others on digits, in memory: eight clients of equal size, all in each of 20 rounds. A liar trains as the
others, and then changes its message: every message is well formed, decoded and encoded again by the method's own codec.
The simulation reads, refuses, bounds and leaves out by the code of a server. A run is held against that without liars.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from thinwire.core.tree import Tree, tmap
from thinwire.errors import Diverged, IncompatibleParts, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Collected, Federation
from thinwire.federation.job import Job
from thinwire.federation.simulated import GroupTask, SimulatedClients
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Reply
from thinwire.protocol.upload import raw, unraw
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire

CLIENTS, ROUNDS, LIARS = 8, 20, (3, 6)
METHODS = (
    *("fedavg", "fedprox", "fedadam", "scaffold", "feddyn", "fednova", "topk", "flasc", "mapo", "thin", "fedlama"),
    *("evofed", "lora"),
)
RULES = ("weighted", "median", "geometric-median", "multi-krum", "nearest-mixing")
LARGEST = torch.finfo(torch.float32).max

Change = Callable[[Tree], Tree]


def times(factor: float) -> Change:
    """Every value times a factor."""
    return lambda tree: tmap(lambda x: (x.double() * factor).clamp(-LARGEST, LARGEST).to(x.dtype), tree)


def filled(value: float) -> Change:
    """Every value of a type that has it replaced."""
    return lambda tree: tmap(lambda x: torch.full_like(x, value) if x.is_floating_point() else x, tree)


class Lie(NamedTuple):
    """What a liar does to fields of its message; empty: not to the values."""

    fields: Mapping[int, Change] = {}
    weight: float = 0.0  # times its weight
    message: str = ""  # stale, or other: another client's
    named: bool = True  # whether it must be named


LIES = {
    "huge": Lie({wire.COORDS: filled(1e20)}),
    "NaN": Lie({wire.COORDS: filled(float("nan"))}),
    "sign x10": Lie({wire.COORDS: times(-10.0)}),
    "x-9.9, weight x999": Lie({wire.COORDS: times(-9.9)}, weight=999.0),
    "steps 1": Lie({wire.SHARED: filled(1.0)}, named=False),
    "reports x-10": Lie({wire.SHARED: times(-10.0), wire.REPORT: times(10.0)}),
    "buffers 1e30": Lie({wire.BUFFERS: filled(1e30)}),
    "buffers -1": Lie({wire.BUFFERS: filled(-1.0)}),
    "stale": Lie(message="stale"),
    "other's number": Lie(message="other"),
    "colluding": Lie({wire.COORDS: times(-2.0)}, named=False),
    "slow drift": Lie({wire.COORDS: times(-1.0)}, named=False),
}


class Liars(SimulatedClients):
    """Simulated clients of which some change their messages.

    Args:
        federation: the federation.
        lie: what they do.
        liars: who they are.
    """

    def __init__(self, federation: Federation, lie: Lie, liars: Sequence[int]) -> None:
        super().__init__(federation)
        self.lie, self.liars, self.before, self.told = lie, liars, dict[int, bytes](), False

    def answers(self, tasks: list[GroupTask], got: Collected) -> Iterator[list[Reply]]:
        """The replies of all groups, with those of liars changed."""
        for replies in super().answers(tasks, got):
            by = {one.client: bytes(one.message) for one in replies}
            yield [one._replace(message=self.changed(one, by)) if one.client in self.liars else one for one in replies]
            self.before = by

    def changed(self, reply: Reply, by: dict[int, bytes]) -> bytes:
        """The message of a liar."""
        honest = bytes(reply.message)
        if self.lie.message:
            made = self.before.get(reply.client, honest) if self.lie.message == "stale" else by[0]
            self.told = self.told or made != honest
            return made
        contract = self.contract.at(reply.version)
        schema = contract.schema.sent_by(reply.client)
        message = wire.unpack(honest, schema)
        body = wire.unpack_body(message.bodies[0], schema)
        fields = dict(body.fields)
        for field, change in self.lie.fields.items():
            if field in fields and (made := encoded(contract, reply, body, field, change)):
                self.told, fields[field] = self.told or made != bytes(fields[field]), made
        if self.lie.weight and wire.WEIGHT in fields:
            fields[wire.WEIGHT] = wire.pack_weight(self.lie.weight * wire.unpack_weight(fields[wire.WEIGHT]))
        packed = wire.pack_body(wire.Body(body.plan, fields), schema)
        return bytes(wire.pack(wire.UP, message.version, [packed], schema))


def encoded(contract: Contract, reply: Reply, body: Any, field: int, change: Change) -> bytes:
    """A field with changed values; empty if the codec cannot encode them."""
    plan = Plan(contract.sendable.named if body.plan is None else body.plan)
    if field == wire.COORDS:
        spec, up, peer = contract.sent(plan).code, contract.up(reply.client), contract.peer(reply.version, reply.client)
        try:
            return bytes(up.encode(change(up.decode(body.fields[field], spec, peer)), up.init(spec), peer)[0])
        except (WireError, ValueError):
            return b""
    own = {wire.SHARED: contract.report, wire.BUFFERS: contract.buffers}.get(field, contract.sent(plan).report)
    return bytes(raw(change(unraw(body.fields[field], own))))


class Result(NamedTuple):
    """What became of a run."""

    accuracy: float
    told: bool  # whether the method has what the lie changes
    liars: int  # rounds in which each liar was named, all together, or left out
    honest: tuple[str, ...]  # honest clients that were refused or left out, with the reason
    bounded: int  # how often an honest client was scaled down
    error: str = ""


@cache
def job_of(method: str, rule: str, buffers: bool, rounds: int = ROUNDS) -> Job:
    """The job of a run; with batch normalization for lies about buffers."""
    more: dict[str, Any] = {"task.clients": CLIENTS, "cohort.size": CLIENTS, "rounds": rounds, "eval.every": rounds}
    more |= {"task.partition.kind": "iid", "method.aggregator": {"kind": rule}}
    job = build_job(resolve(method, "digits", more))
    if buffers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        job = replace(job, task=replace(job.task, model=model))
    return job


def run(method: str, rule: str, lie: str, liars: int, rounds: int = ROUNDS) -> Result:
    """One run; without a lie if its name is empty."""
    one, who = LIES.get(lie.removesuffix(" (buffers)"), Lie()), LIARS[: liars if lie in LIES else 0]
    job = job_of(method, rule, "buffers" in lie, rounds)
    federation = Federation(Engine("cpu", "vmap"), job, partial(Liars, lie=one, liars=who))
    state, named, honest, bounded, accuracy = federation.start(), 0, dict[int, str](), 0, 0.0
    try:
        for _ in range(rounds):
            state, record = federation.round(state)
            accuracy = record.accuracy if record.accuracy is not None else accuracy
            for client, why in record.why.items():
                if int(client) in who:
                    named += 1
                elif why.startswith("bounded"):
                    bounded += 1
                else:
                    honest[int(client)] = why
    except Diverged as error:
        return Result(0.0, True, named, (), bounded, str(error))
    told = federation.clients.told  # type: ignore[attr-defined]
    return Result(accuracy, told, named, tuple(f"{i}: {why}" for i, why in honest.items()), bounded)


def line(setting: tuple[str, str, str, int]) -> tuple[tuple[str, str, str, int], Result | None]:
    """A run and its setting; None if the parts cannot be combined."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return setting, run(*setting)
    except IncompatibleParts:
        return setting, None


def main() -> None:
    """Run all and print a line for each, the worst last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rules", nargs="+", default=["weighted"])
    parser.add_argument("--lies", nargs="+", default=list(LIES))
    parser.add_argument("--liars", nargs="+", type=int, default=[1])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two methods and four lies")
    options = parser.parse_args()
    if options.quick:
        options.methods, options.lies = ["fedavg", "scaffold"], ["NaN", "sign x10", "reports x-10", "buffers 1e30"]
    plain = [("", 0), (" (buffers)", 0)]
    settings = [*product(options.methods, options.rules, options.lies, options.liars)]
    settings = [(m, r, lie, n) for m, r in product(options.methods, options.rules) for lie, n in plain] + settings
    with ProcessPoolExecutor(options.jobs) as pool:
        found = {}
        for setting, one in pool.map(line, settings):
            if one is not None:
                found[setting] = one
                print_line(setting, one, found)
    lies = {key: one for key, one in found.items() if key[3] and one.told}
    lost = {key: found[base_of(key)].accuracy - one.accuracy for key, one in lies.items()}
    silent = [key for key, one in lies.items() if LIES[key[2]].named and not one.liars]
    print(f"{len(lies)} runs with a lie, {sum(bool(one.error) for one in lies.values())} stopped,")
    print(f"{sum(bool(one.honest) for one in lies.values())} with an honest client refused or left out,")
    print(f"{len(silent)} in which the liar was not named {silent},")
    for rule, liars in product(options.rules, options.liars):
        those = {key: 100 * one for key, one in lost.items() if key[1] == rule and key[3] == liars}
        if those:
            worst = sorted(those, key=lambda key: -those[key])[:8]
            print(f"{rule}, {liars} of {CLIENTS}: at most {those[worst[0]]:.1f} points lost;", end=" ")
            print(", ".join(f"{key[0]} {key[2]} {those[key]:.1f}" for key in worst))


def base_of(setting: tuple[str, str, str, int]) -> tuple[str, str, str, int]:
    """The setting without liars of the same method, rule and model; of a robust rule, the weighted mean."""
    method, rule, lie, _ = setting
    return method, rule, " (buffers)" if "buffers" in lie else "", 0


def print_line(setting: tuple[str, str, str, int], one: Result, found: dict[Any, Result]) -> None:
    """Print a run: accuracy, points lost, rounds in which liars are named, honest clients bounded, refused."""
    if one.told or not setting[3]:
        lost = 100 * (found[base_of(setting)].accuracy - one.accuracy)
        words = f"{100 * one.accuracy:5.1f} {-lost:+6.1f}  named {one.liars:2d}, honest bounded {one.bounded:3d}"
        name = " ".join(map(str, setting))
        print(f"{name:45} {words} {one.error[:150]} {'; '.join(one.honest)[:150]}", flush=True)


if __name__ == "__main__":
    main()
