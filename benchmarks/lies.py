"""Accuracy, refusals and names by lie, method and aggregation rule: one or two of eight clients lie in every round.

    python benchmarks/lies.py                              the default rule, one liar: every lie, every method
    python benchmarks/lies.py --rules weighted multi-krum --liars 1 2 --json docs/results/lies.jsonl --docs docs
    python benchmarks/lies.py --quick                      a few of them, as a test

FedAvg and others on digits, in memory: eight clients of equal size, all in each of 20 rounds. A liar trains as the
others, and then changes its message: every message is well formed, decoded and encoded again by the method's own codec.
The simulation reads, refuses, bounds and leaves out by the code of a server. A run is held against that without liars.
A run whose method has nothing that the lie changes ends after three rounds and does not count. With --json each run is
a line of a file, and those that are there are not made again; --docs writes the table of this file.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.page import write_part
from papers.markdown import markdown
from thinwire.core.tree import Tree, tmap
from thinwire.errors import Diverged, IncompatibleParts, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Collected, Federation
from thinwire.federation.job import Job, RunState
from thinwire.federation.simulated import GroupTask, SimulatedClients
from thinwire.protocol.bounds import Known
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
    told: bool = True  # whether the server knows the sizes of clients, as in a simulation
    named: bool = True  # whether it must be named


LIES = {
    "huge": Lie({wire.COORDS: filled(1e20)}),
    "NaN": Lie({wire.COORDS: filled(float("nan"))}),
    "sign x10": Lie({wire.COORDS: times(-10.0)}),
    "x-9.9, weight x999": Lie({wire.COORDS: times(-9.9)}, weight=999.0),
    "x-9.9, weight x999, sizes unknown": Lie({wire.COORDS: times(-9.9)}, weight=999.0, told=False),
    "x-1, weight x999, sizes unknown": Lie({wire.COORDS: times(-1)}, weight=999.0, told=False),
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

    def known(self, state: RunState, client: int) -> Known | None:
        """What a server knows about a client: its size, or only what it claimed first."""
        if self.lie.told:
            return super().known(state, client)
        weights = state.standing.weights
        return Known(weights[client]) if client in weights else None

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
        if self.lie.weight and wire.WEIGHT not in fields:
            return honest
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
    federation = Federation(Engine("cpu", "auto"), job, partial(Liars, lie=one, liars=who))
    state, named, honest, bounded, accuracy = federation.start(), 0, dict[int, str](), 0, 0.0
    try:
        for done in range(rounds):
            if done == 3 and who and not federation.clients.told:  # type: ignore[attr-defined]
                return Result(accuracy, False, named, (), bounded)
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


def line(setting: Setting) -> tuple[Setting, Result | None]:
    """A run and its setting; None if the parts cannot be combined."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return setting, run(*setting)
    except IncompatibleParts:
        return setting, None


def main() -> None:
    """Make the runs that are missing, print a line for each, and the worst of each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rules", nargs="+", default=["weighted"])
    parser.add_argument("--lies", nargs="+", default=list(LIES))
    parser.add_argument("--liars", nargs="+", type=int, default=[1])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a line for each run; what is there is not run again")
    parser.add_argument("--docs", type=Path, help="the documentation folder; its safe-rounds.md gets the table")
    parser.add_argument("--no-run", action="store_true", help="only the table of what is there")
    parser.add_argument("--quick", action="store_true", help="two methods and four lies")
    options = parser.parse_args()
    if options.quick:
        options.methods, options.lies = ["fedavg", "scaffold"], ["NaN", "sign x10", "reports x-10", "buffers 1e30"]
    found = read(options.json)
    lies = product(options.rules, options.liars, options.lies, options.methods)
    settings = [(m, r, lie, 0) for r, lie, m in product(options.rules, ("", " (buffers)"), options.methods)]
    settings += [(m, r, lie, n) for r, n, lie, m in lies]
    if not options.no_run:
        missing = [setting for setting in settings if setting not in found]
        with ProcessPoolExecutor(options.jobs) as pool:
            for setting, one in pool.map(line, missing):
                found[setting] = one
                print_line(setting, one, found)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps([*setting, one]) + "\n")
    text = table({setting: one for setting, one in found.items() if one is not None})
    print(text)
    if options.docs:
        command = f"python benchmarks/lies.py --no-run --json {options.json.as_posix()} --docs docs"
        write_part(options.docs / "safe-rounds.md", "lies", text, command)


Setting = tuple[str, str, str, int]  # method, rule, lie, liars


def read(path: Path | None) -> dict[Setting, Result | None]:
    """The runs of a file."""
    lines = [json.loads(one) for one in path.read_text().splitlines()] if path and path.exists() else []
    return {(m, r, lie, n): one and Result(*one[:3], tuple(one[3]), *one[4:]) for m, r, lie, n, one in lines}


def table(found: Mapping[Setting, Result]) -> str:
    """Of each rule and number of liars: runs, runs that stopped, lies not named, and the worst losses."""
    lies = {key: one for key, one in found.items() if key[3] and one.told and base_of(key) in found}
    rows = []
    for rule, liars in sorted({key[1::2] for key in lies}, key=lambda one: (RULES.index(one[0]), one[1])):
        those = {key: one for key, one in lies.items() if key[1::2] == (rule, liars)}
        lost = {key: 100 * (found[base_of(key)].accuracy - one.accuracy) for key, one in those.items()}
        silent = [f"{key[0]} {key[2]}" for key, one in those.items() if LIES[key[2]].named and not one.liars]
        worst = sorted(lost, key=lambda key: -lost[key])[:4]
        words = ", ".join(f"{key[0]} {key[2]} {lost[key]:.1f}" for key in worst)
        honest = sum(bool(one.honest) for one in those.values())
        base = [100 * one.accuracy for key, one in found.items() if key[1] == rule and key[2:] == ("", 0)]
        accuracy = f"{min(base):.1f} to {max(base):.1f}"
        stopped = sum(bool(one.error) for one in those.values())
        rows.append([*map(str, (rule, liars, accuracy, len(those), stopped, honest)), ", ".join(silent) or "0", words])
    head = ["rule", "liars of 8", "accuracy without", "runs", "stopped", "honest client refused or left out"]
    return markdown([*head, "liar never named", "points lost, the four worst"], rows)


def base_of(setting: Setting) -> Setting:
    """The setting without liars of the same method, rule and model."""
    method, rule, lie, _ = setting
    return method, rule, " (buffers)" if "buffers" in lie else "", 0


def print_line(setting: Setting, one: Result | None, found: Mapping[Setting, Result | None]) -> None:
    """Print a run: accuracy, points lost, rounds in which liars are named, honest clients bounded, refused."""
    base = found.get(base_of(setting))
    if one is not None and base is not None and (one.told or not setting[3]):
        words = f"{100 * one.accuracy:5.1f} {100 * (one.accuracy - base.accuracy):+6.1f}  named {one.liars:2d}"
        name = " ".join(map(str, setting))
        print(f"{name:45} {words}, honest bounded {one.bounded:3d} {one.error[:150]} {'; '.join(one.honest)[:150]}")


if __name__ == "__main__":
    main()
