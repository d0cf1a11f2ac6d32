"""Combinations of parts: any parts together train to a finite loss, or are refused before training.

Every registered part has an entry here, with settings for a small model; a part without one fails a test, whose message
contains the entry to write. The rows cover all pairs: each pair of choices of two slots either occurs in a row that
trains, or is refused when all other slots are those of FedAvg.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

import torch
from torch import nn

import thinwire as tw
from tests import parts
from tests.federation import Federation, digits_task, same_public
from thinwire.core.key import Key
from thinwire.core.registry import SLOTS, entries
from thinwire.core.tree import Spec
from thinwire.data.task import Task
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.protocol import Method
from thinwire.protocol.method import Download, OptLifetime, OptOwner, UploadKind
from thinwire.protocol.round import Round
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.training import Local
from thinwire.training.functional import Functional

Choice = dict[str, str]  # slot -> name of an entry

# kind -> name -> a part. The name starts with the registered one; what follows "/" is a variant of it.
ENTRIES: dict[str, dict[str, Any]] = {
    "space": {
        "full": tw.spaces.Full(),
        "mapo": tw.spaces.MAPO(k=32),
        "mapo/kept": tw.spaces.MAPO(k=32, redraw_every=0),
        "mapo/2": tw.spaces.MAPO(k=32, redraw_every=2, entries="gaussian", layout="contiguous"),
        "mapa": tw.spaces.MAPA(p=16),
        "mapax": tw.spaces.MAPAX(segment=64, budget=32),
        "fedpara": tw.spaces.FedPara(rank=2, activation="tanh"),
        "fedpara/personal": tw.spaces.FedPara(rank=2, personal=True),
        "fedpara/gammas": tw.spaces.FedPara(gamma=0.0, gammas=(("1.*", 0.5),)),
        "fedpm": tw.spaces.FedPM(),
        "fedpm/base": tw.spaces.FedPM(weights="base", test="sample"),
        "fedmrn": tw.spaces.FedMRN(noise=0.05),
        "fedmrn/kept": tw.spaces.FedMRN(noise=0.05, signed=False, progressive=False, redraw_every=0),
        "lowrank": tw.spaces.LowRank(rank=2),
        "pufferfish": tw.spaces.Pufferfish(ratio=0.5, first_dense=0),
        "factorized-fl": tw.spaces.FactorizedFL(),
        "lora": tw.spaces.LoRA(rank=2),
        "lora/merged": tw.spaces.LoRA(rank=2, redraw_every=2),
        "lora/frozen-a": tw.spaces.LoRA(rank=2, freeze_a=True),
        "lora/orthonormal": tw.spaces.LoRA(rank=2, freeze_a=True, init_lora_weights="orthonormal"),
        "lora-residual": tw.spaces.LoRAResidual(rank=2),
        "lora-sum": tw.spaces.LoRASum(rank=2),
        "lora-stack": tw.spaces.LoRAStack(rank=1, dense="auto"),
        "lora-sb": tw.spaces.LoRASB(rank=3),
        "route": tw.spaces.Route((("*.bias", tw.spaces.Full()), ("*", tw.spaces.MAPO(k=8)))),
        "frozen": tw.spaces.Route(
            (("5.*", tw.spaces.Full()), ("*", tw.spaces.Frozen()))
        ),  # alone it has no parameters to train
    },
    "sketch": {
        "identity": tw.sketches.Identity(),
        "evofed": tw.sketches.EvoFed(population=8, partitions=2),
        "evofed/paired": tw.sketches.EvoFed(population=8, shaping="none", fitness="square", paired=True),
        "count": tw.sketches.CountSketch(rows=3, k=40),
        "count/wide": tw.sketches.CountSketch(columns=32),
        "test-project": parts.Project(),
        "test-pool": parts.Pool(0.5),
    },
    "schedule": {
        "all-blocks": tw.schedules.AllBlocks(),
        "all-blocks/private": tw.schedules.AllBlocks(private=("1.*",)),
        "fedlama": tw.schedules.FedLAMA(phi=2),
        "fedlama/public": tw.schedules.FedLAMA(phi=2, rules="public", accelerate=True),
        "test-turns": parts.Turns(2),
    },
    "codec": {
        "raw": tw.codecs.Raw(),
        "topk": tw.codecs.TopK(0.2),
        "topk/block": tw.codecs.TopK(0.2, by="block", inner=tw.codecs.Quantize(8)),
        "threshold": tw.codecs.Threshold(1e-4),
        "masked": tw.codecs.Masked(),
        "randomk": tw.codecs.RandomK(0.5),
        "randomk/shared": tw.codecs.RandomK(0.5, shared=True),
        "binary": tw.codecs.Binary((-0.1, 0.1)),
        "rank-slice": tw.codecs.RankSlice(1),  # of adapters
        "quantize": tw.codecs.Quantize(8),
        "quantize/sign": tw.codecs.Quantize(scheme="sign"),
        "quantize/sign-magnitude": tw.codecs.Quantize(scheme="sign-magnitude"),
        "quantize/qsgd": tw.codecs.Quantize(8, scheme="qsgd"),
        "quantize/fp16": tw.codecs.Quantize(scheme="fp16"),
        "lattice": tw.codecs.Lattice(0.1),
        "lattice-sum": tw.codecs.LatticeSum(),
        "eden": tw.codecs.Eden(4),
        "eden/half": tw.codecs.Eden(0.5),
        "power-sgd": tw.codecs.PowerSGD(2),
        "topk/chunk": tw.codecs.TopK(0.2, by="chunk", chunk=64),
        "error-feedback": tw.codecs.ErrorFeedback(tw.codecs.TopK(0.2)),
        "chain": tw.codecs.Chain((tw.codecs.ErrorFeedback(), tw.codecs.TopK(0.2), tw.codecs.Quantize(4))),
        "route": tw.codecs.ByBlock((("*", tw.codecs.Quantize(8)),)),
    },
    "aggregator": {
        "weighted": tw.aggregators.WeightedMean(),
        "trimmed": tw.aggregators.TrimmedMean(0.4),
        "median": tw.aggregators.Median(),
        "geometric-median": tw.aggregators.GeometricMedian(),
        "centered-clipping": tw.aggregators.CenteredClipping(),
        "multi-krum": tw.aggregators.MultiKrum(0.3),
        "nearest-mixing": tw.aggregators.NearestMixing(0.3),
        "bounded": tw.aggregators.Bounded(norm=5.0, weight=20.0),
    },
    "norm_bound": {"ten": 10.0, "none": 0.0, "one": 1.0},
    "client_weight": {"samples": tw.aggregators.BySamples(), "uniform": tw.aggregators.Uniform()},
    "client_opt": {
        "sgd": tw.optimizers.SGD(0.05),
        "sgd/momentum": tw.optimizers.SGD(0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
        "adam": tw.optimizers.Adam(0.005),
        "adamw": tw.optimizers.AdamW(0.005),
        "muon": tw.optimizers.Muon(0.005),
        "yogi": tw.optimizers.Yogi(0.005),
        "adagrad": tw.optimizers.Adagrad(0.01),
        "forward-sgd": tw.optimizers.ForwardSGD(0.01, directions=2),
        "forward-sgd/random": tw.optimizers.ForwardSGD(0.01, directions=2, order="random"),
        "beta-posterior": tw.optimizers.BetaPosterior(0.05),
    },
    "server_opt": {
        "sgd": tw.optimizers.SGD(1.0),
        "sgd/momentum": tw.optimizers.SGD(0.5, momentum=0.5),
        "adam": tw.optimizers.Adam(0.01, eps=1e-3, bias_correction=False),
        "adamw": tw.optimizers.AdamW(0.01),
        "muon": tw.optimizers.Muon(0.01),
        "yogi": tw.optimizers.Yogi(0.01),
        "adagrad": tw.optimizers.Adagrad(0.01),
        "forward-sgd": tw.optimizers.ForwardSGD(1.0),
        "beta-posterior": tw.optimizers.BetaPosterior(prior=2.0, reset_every=2),
    },
    "lr_schedule": {
        "constant": tw.optimizers.ConstantLR(),
        "exponential": tw.optimizers.ExponentialLR(0.9),
        "multistep": tw.optimizers.MultiStepLR((1,), 0.5),
        "cosine": tw.optimizers.CosineLR(3),
        "warmup": tw.optimizers.WarmupLR(2, inner=tw.optimizers.ExponentialLR(0.9)),
    },
    "correction": {
        "none": tw.optimizers.NoCorrection(),
        "fedprox": tw.optimizers.FedProx(),
        "scaffold": tw.optimizers.Scaffold(),
        "feddyn": tw.optimizers.FedDyn(),
        "fednova": tw.optimizers.FedNova(),
    },
    "penalty": {
        "none": tw.optimizers.NoPenalty(),
        "l1l2": tw.optimizers.L1L2(l1=1e-4, l2=1e-3),
        "l1l2/coords": tw.optimizers.L1L2(l1=1e-3, coords=("*",)),
        "jacobian": tw.optimizers.Jacobian(0.1),
    },
    "privacy": {"none": tw.privacy.NoPrivacy(), "dp": tw.privacy.DP(clip=0.1, sigma=0.1), "test-clip": parts.Clip()},
    "mask": {
        "none": tw.masks.NoMask(),
        "topk": tw.masks.TopKMask(0.5),
        "topk/block": tw.masks.TopKMask(0.5, by="block", at=1),
        "prune": tw.masks.PruneMask(0.5),
        "prune/block": tw.masks.PruneMask(0.5, by="block"),
        "prune/slowly": tw.masks.PruneMask(1.0, keep=0.7),
        "random": tw.masks.RandomMask(0.5),
        "turns": tw.masks.TurnsMask(("*.weight*", "*.bias*")),
    },
    "budget": {
        "none": tw.Budget(),
        "tiers": tw.Budget((tw.Tier(up=tw.codecs.ErrorFeedback(tw.codecs.TopK(0.2))), tw.Tier()), clients=(0, 1, 0)),
        "tiers/down": tw.Budget((tw.Tier(up=tw.codecs.TopK(0.2), down=tw.codecs.Quantize(8)), tw.Tier(0.5))),
    },
    "next_stage": {
        "none": None,
        "lora": tw.Stage(1, tw.spaces.LoRA(rank=2), mask=tw.masks.NoMask()),
        "full": tw.Stage(2, tw.spaces.Full()),
    },
    "asynchronous": {"none": tw.Asynchronous(), "fedbuff": tw.Asynchronous(2.0)},
    "secure_aggregation": {"no": False, "yes": True},
    "drift_check": {"on": True, "off": False},
    "evaluate": {"server": "server", "client": "client", "average": "average"},
    "ema_decay": {"0.95": 0.95, "0": 0.0},
    "opt_lifetime": {value: value for value in get_args(OptLifetime)},
    "opt_owner": {value: value for value in get_args(OptOwner)},
    "download": {value: value for value in get_args(Download)},
    "upload": {value: value for value in get_args(UploadKind)},
}


def missing() -> list[str]:
    """One message for each part or slot without an entry, with the entry to write."""
    out = []
    for kind in sorted(set(SLOTS.values())):
        for table in {slot if slot in ENTRIES else kind for slot, of in SLOTS.items() if of == kind}:
            known = {name.split("/")[0] for name in ENTRIES.get(table, {})}
            out += [
                f'{kind} {name!r} is registered but not in tests/combinations.py: add "{name}": {entry.make.__name__}'
                f"(settings for a model of some 400 weights) to ENTRIES[{table!r}]"
                for name, entry in entries(kind).items()
                if name not in known and entry.make.__module__.startswith("thinwire.")
            ]
    for field in dataclasses.fields(Method):
        if field.name not in SLOTS and field.name not in ENTRIES:
            out.append(f"Method.{field.name} is a slot without entries: add ENTRIES[{field.name!r}]")
    return out


@cache
def choices() -> dict[str, dict[str, Any]]:
    """Slot -> name -> part; the first part of a slot is that of FedAvg."""
    slots = [field.name for field in dataclasses.fields(Method)]
    out = {slot: ENTRIES[slot] if slot in ENTRIES else ENTRIES[SLOTS[slot]] for slot in slots}
    probe = Spec.of({"w": torch.zeros(8)})  # a merge codec with state is always refused
    out["merge_codec"] = {name: part for name, part in out["merge_codec"].items() if not part.init(probe)}
    return out


def plain() -> Choice:
    """The choice of FedAvg."""
    return {slot: next(iter(known)) for slot, known in choices().items()}


def method_of(choice: Mapping[str, str]) -> Method:
    """The method of a choice."""
    return Method(**{slot: choices()[slot][name] for slot, name in choice.items()})


@cache
def task(no_statistics: bool = False) -> Task:
    """Digits with three clients of unequal sizes, and a network with a convolution, running statistics and a head.

    Secure aggregation and differential privacy do not support running statistics: they get a group norm instead.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.GroupNorm(2, 4) if no_statistics else nn.BatchNorm2d(4)
        conv = (nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 4, 2), norm, nn.ReLU(), nn.Flatten())
        model = nn.Sequential(*conv, nn.Linear(36, 10))
    return digits_task(model, sizes=(10, 7, 5), test=0)


@cache
def model(no_statistics: bool = False) -> Functional:
    """The network of `task` as a pure function."""
    return Functional.of(task(no_statistics).model, task(no_statistics).loss)


COHORTS = ((0, 1), (1, 2), (0,))
SECURE_COHORTS = ((0, 1), (1, 2), (0, 1))  # secure aggregation needs two clients


def refused(choice: Mapping[str, str]) -> str | None:
    """Why a combination is refused before training; None if it is not. Any other error is a bug and is raised."""
    try:
        method = method_of(choice)
        learner = model(method.secure_aggregation or method.privacy.bounds)
        contract, public = make_contract(method.over(3), learner.weights(), learner.buffers(), Key(0))
        Round.open(contract, initial_server_state(contract, public))
    except (IncompatibleParts, ConfigError) as error:
        return str(error)
    return None


def train(choice: Mapping[str, str]) -> None:
    """Train three rounds over real messages with changing cohorts; raises unless all losses are finite."""
    method = method_of(choice)
    federation = Federation(method, task(method.secure_aggregation or method.privacy.bounds), Local(batch=8))
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False  # slower for such a small network
    try:
        for cohort in SECURE_COHORTS if method.secure_aggregation else COHORTS:
            federation.round(cohort)
    finally:
        torch.backends.mkldnn.enabled = before
    assert all(math.isfinite(loss) for loss in federation.losses), f"losses {federation.losses}"
    if federation.method.download == "incremental":
        federation.download(2)
        assert same_public(federation.public[2], federation.server.public), "a client that caught up has another state"


def reason(error: str) -> str:
    """An error message without the names and settings of parts and blocks, for counting."""
    while (shorter := re.sub(r"\b[A-Z]\w+(\([^()]*\))", "PART", re.sub(r"=\([^()]*\)", "=", error))) != error:
        error = shorter
    return re.sub(r"'[^']*[/*\d][^']*'", "BLOCK", error)


def all_pairs(seed: int = 0, one_in: int = 1) -> tuple[list[Choice], dict[tuple[tuple[str, str], ...], str]]:
    """Rows that together contain every pair of choices that can train; and the pairs that cannot, with the reason.

    Args:
        seed: of the rows, and of the pairs if not all are taken.
        one_in: 100 for a random hundredth of the pairs; every choice still occurs in a row.
    """
    draw = random.Random(seed)
    known = choices()
    levels = [(slot, name) for slot, names in known.items() for name in names]
    base = plain()
    no: dict[tuple[tuple[str, str], ...], str] = {}
    open_pairs = set()
    for a, b in itertools.combinations(levels, 2):
        if a[0] != b[0] and draw.randrange(one_in) == 0:
            if why := refused({**base, **dict((a, b))}):
                no[a, b] = why
            else:
                open_pairs.add((a, b))
    clash = {pair for a, b in no for pair in ((a, b), (b, a))}
    rows = []
    while open_pairs:
        first = min(open_pairs)
        row = dict(first)
        slots = [slot for slot in known if slot not in row]
        draw.shuffle(slots)
        for slot in slots:
            fitting = [name for name in known[slot] if not any(((slot, name), item) in clash for item in row.items())]
            fitting = fitting or list(known[slot])  # `_repair` resolves the clash
            gain = {name: _gain(open_pairs, row, (slot, name)) + draw.random() for name in fitting}
            best = sorted(fitting, key=lambda name: -gain[name])
            row[slot] = best[0]
            if not slots.index(slot) % 4 or slot == slots[-1]:  # three parts may clash although no two of them do
                row = _repair(row, base, first)
        rows.append(row)
        done = set(itertools.combinations(row.items(), 2))
        open_pairs -= done | {pair[::-1] for pair in done}
    used = {item for row in rows for item in row.items()}
    rows += [_row_with(level, levels) for level in levels if level not in used]  # none if all pairs are taken
    return rows, no


def _row_with(level: tuple[str, str], levels: list[tuple[str, str]]) -> Choice:
    """A row of FedAvg's choices but this one, and one more if it needs another."""
    rows = ({**plain(), **dict((other, level))} for other in (level, *levels))
    return next(row for row in rows if row[level[0]] == level[1] and refused(row) is None)


def _gain(open_pairs: set[Any], row: Choice, item: tuple[str, str]) -> int:
    return sum((other, item) in open_pairs or (item, other) in open_pairs for other in row.items())


def _repair(row: Choice, base: Choice, keep: Any) -> Choice:
    """The row with some choices replaced by those of FedAvg, so that it trains."""
    if refused({**base, **row}) is None:
        return row
    out = dict(keep)
    for slot, name in row.items():
        trial = {**out, slot: name}
        out[slot] = name if refused({**base, **trial}) is None else base[slot]
    return out
