"""All parts fulfill the contract of their kind: the entries of tests/combinations.py, and more settings of some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.combinations import ENTRIES
from tests.parts import Drift, Half, Product, Remember
from thinwire import aggregators, codecs, optimizers as opt, privacy, sketches, spaces, testing
from thinwire.codecs import ByBlock, Chain, Eden, ErrorFeedback, Lattice, Quantize, RandomK, Raw, TopK
from thinwire.schedules import FedLAMA
from thinwire.sketches import EvoFed
from thinwire.spaces import MAPA, MAPAX, MAPO, FedPara, Frozen, Full, LoRA, Route

CHECKS = {
    "space": testing.check_space,
    "sketch": testing.check_sketch,
    "schedule": testing.check_schedule,
    "codec": testing.check_codec,
    "aggregator": testing.check_aggregator,
    "client_opt": testing.check_optimizer,
    "lr_schedule": testing.check_lr_schedule,
    "correction": testing.check_correction,
    "privacy": testing.check_privacy,
}
MIXED = Route((("conv*", LoRA(rank=2)), (("fc.*", "head.*"), Full()), ("*", Frozen())))
MORE: dict[str, list[Any]] = {
    "space": [
        *(MAPO(k=8, layout="strided", redraw_every=3), MAPA(p=6, entries="gaussian", normalize="orthonormal")),
        *(MAPAX(k=5, p=3, entries="gaussian", normalize="none", redraw_every=0), MAPAX(k=5, p=3, scale="unit")),
        *(
            FedPara(),
            FedPara(gamma=1.0, personal=True),
            FedPara(rank=2, start="factor_he", modules_to_save=("head.*",)),
        ),
        FedPara(rank=2, start="composed_he", target_modules=("conv*",)),
        FedPara(activation="tanh", start="composed", scale="isometric", dense="auto"),
        spaces.LowRank(like_gamma=0.5, target_modules=("conv*", "fc*"), modules_to_save=("fc*",)),
        spaces.Pufferfish(first_dense=0, target_modules=("fc*", "head*")),
        spaces.FactorizedFL(modules_to_save=("head*",), prune=0.1),
        *(spaces.FedPM(test="round", gain=2.0), spaces.FedMRN(0.5, signed=False)),
        LoRA(rank=3, alpha=1.0, target_modules=("fc.*", "head.*")),
        LoRA(rank=2, target_modules=("*", "!conv*"), modules_to_save=("*bias", "head.*", "scale")),
        LoRA(rank=1, redraw_every=3, freeze_a=True, modules_to_save=("norm.*",)),
        LoRA(rank=2, fan_in_fan_out=("fc.weight",)),
        *(spaces.LoRAResidual(rank=2, dense="auto"), Frozen(), Route(), MIXED),
        Route((("conv*", LoRA(rank=1, redraw_every=2)), ("fc.*", LoRA(2, redraw_every=2)), ("*", Full()))),
        Route((("fc.*", Drift(k=3)), ("*", Frozen()))),
        Route((("conv*", MAPO(k=4)), ("fc.*", MAPO(k=4)), ("head.*", LoRA(rank=2, redraw_every=1)), ("*", Full()))),
    ],
    "sketch": [
        *(EvoFed(6, shaping="zscore", partitions=100), EvoFed(4, paired=True, partitions=2)),
        *(sketches.CountSketch(), sketches.CountSketch(1, 7), sketches.CountSketch(4, 64, k=3)),
    ],
    "schedule": [FedLAMA(4, rules="public"), FedLAMA(3, accelerate=True), FedLAMA(3, private=("fc.*",))],
    "codec": [
        *(Quantize(2), Quantize(13), Quantize(32), Quantize(1, "uniform"), Quantize(12, "uniform")),
        *(Quantize(24, "qsgd"), Quantize(4, stochastic=True), Quantize(scheme="bf16")),
        *(Quantize(4, block=3), Quantize(scheme="sign", per="tree"), Quantize(scheme="sign-magnitude", block=3)),
        *(TopK(0.3, rounding="up"), TopK(1.0, inner=Quantize(8)), codecs.Threshold(100.0, inner=Quantize(8))),
        *(codecs.Threshold(0.0), codecs.Masked(inner=Quantize(8)), RandomK(0.5, inner=RandomK(0.5))),
        *(RandomK(0.3, unbiased=False, inner=Quantize(8)), ErrorFeedback(RandomK(0.2, unbiased=False))),
        *(
            Eden(2.5),
            Eden(8, unbiased=False),
            Lattice(1.0, stochastic=True),
            Lattice(3.0, dither=True),
            ErrorFeedback(Lattice(2.0)),
        ),
        codecs.Binary((0.0, 1.0)),
        *(codecs.RankSlice(2, inner=Quantize(8)), codecs.RankSlice(2, rows=("*.weight/a",)), codecs.RankSlice(99)),
        *(Half(), Remember(), Chain((TopK(0.5), RandomK(0.5), Quantize(8, "uniform")))),
        ByBlock((("fc.weight*", ErrorFeedback(Quantize(4))), ("head*", TopK(0.5)), ("*", Raw()))),
        ErrorFeedback(ByBlock((("fc*", TopK(0.5)), ("*", Quantize(8))))),
        ByBlock((("!*", Raw()), (("*", "!scale"), RandomK(0.5)), ("*", RandomK(0.5)))),
    ],
    "aggregator": [aggregators.MultiKrum(2), aggregators.NearestMixing(2)],
    "client_opt": [
        *(opt.SGD(0.5, momentum=0.9, weight_decay=0.1), opt.Adam(bias_correction=False)),
        *(
            replace(one, clip_norm=0.3)
            for one in ENTRIES["client_opt"].values()
            if not isinstance(one, opt.BetaPosterior)
        ),
    ],
    "lr_schedule": [opt.ExponentialLR(0.1), opt.MultiStepLR(tuple(range(1, 40)))],
    "correction": [opt.FedNova(0.9)],
    "privacy": [privacy.DP(clip=1e-3, sigma=0.0), privacy.DP(sigma=2.0, cohort=1000)],
}
FACTORS = (FedPara, spaces.LowRank, spaces.Pufferfish, spaces.FactorizedFL, spaces.FedPM)  # these draw initial weights


# entries that name blocks of another model
OTHER = ("all-blocks/private", "fedpara/gammas", "frozen")
ENTRIES_OF = {kind: [part for name, part in ENTRIES[kind].items() if name not in OTHER] for kind in CHECKS}


@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind in CHECKS for part in (*ENTRIES_OF[kind], *MORE.get(kind, []))],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_parts_fulfill_the_contract_of_their_kind(kind, part):
    CHECKS[kind](part, **({"starts_at_base": False} if isinstance(part, FACTORS) else {}))


def test_a_route_may_contain_a_space_that_does_not_start_at_the_base():
    testing.check_space(Route((("fc.*", Product()), ("*", Full()))), starts_at_base=False)
