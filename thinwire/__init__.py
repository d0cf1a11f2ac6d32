"""Much learning over a thin link: communication-efficient federated learning that counts real bytes.

    import thinwire as tw
    run = tw.simulate(model, clients, tw.Method(), rounds=50, cohort=10, test=test)
    print(run.accuracy, run.bytes_total)

This page is the public interface; everything else may change. Names are loaded when they are first used, so that
`import thinwire` and `thinwire --help` cost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.codecs.base import Codec as Codec
    from thinwire.codecs.base import Peer as Peer
    from thinwire.codecs.base import Raw as Raw
    from thinwire.codecs.byblock import ByBlock as ByBlock
    from thinwire.codecs.chain import Chain as Chain
    from thinwire.codecs.feedback import ErrorFeedback as ErrorFeedback
    from thinwire.codecs.quantise import Quantise as Quantise
    from thinwire.codecs.rank import RankSlice as RankSlice
    from thinwire.codecs.sparse import Masked as Masked
    from thinwire.codecs.sparse import RandomK as RandomK
    from thinwire.codecs.sparse import Threshold as Threshold
    from thinwire.codecs.sparse import TopK as TopK
    from thinwire.core.registry import register as register
    from thinwire.core.rng import Key as Key
    from thinwire.core.spec import Spec as Spec
    from thinwire.engines.job import Job as Job
    from thinwire.engines.job import RoundRecord as RoundRecord
    from thinwire.engines.local import LocalEngine as LocalEngine
    from thinwire.errors import CheckpointError as CheckpointError
    from thinwire.errors import ConfigError as ConfigError
    from thinwire.errors import DataError as DataError
    from thinwire.errors import Diverged as Diverged
    from thinwire.errors import Drifted as Drifted
    from thinwire.errors import IncompatibleParts as IncompatibleParts
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.errors import UnknownName as UnknownName
    from thinwire.errors import WireError as WireError
    from thinwire.optim.adaptive import Adagrad as Adagrad
    from thinwire.optim.adaptive import Adam as Adam
    from thinwire.optim.adaptive import AdamW as AdamW
    from thinwire.optim.adaptive import Yogi as Yogi
    from thinwire.optim.corrections import FedDyn as FedDyn
    from thinwire.optim.corrections import FedNova as FedNova
    from thinwire.optim.corrections import FedProx as FedProx
    from thinwire.optim.corrections import NoCorrection as NoCorrection
    from thinwire.optim.corrections import Scaffold as Scaffold
    from thinwire.optim.penalties import Jacobian as Jacobian
    from thinwire.optim.penalties import NoPenalty as NoPenalty
    from thinwire.optim.penalties import Norms as Norms
    from thinwire.optim.rates import Constant as Constant
    from thinwire.optim.rates import Cosine as Cosine
    from thinwire.optim.rates import Decay as Decay
    from thinwire.optim.rates import Steps as Steps
    from thinwire.optim.rates import Warmup as Warmup
    from thinwire.optim.sgd import SGD as SGD
    from thinwire.privacy.base import NoPrivacy as NoPrivacy
    from thinwire.privacy.dp import DP as DP
    from thinwire.rounds.batches import Local as Local
    from thinwire.rounds.budget import Budget as Budget
    from thinwire.rounds.budget import Tier as Tier
    from thinwire.rounds.mask import NoMask as NoMask
    from thinwire.rounds.mask import Pick as Pick
    from thinwire.rounds.mask import Prune as Prune
    from thinwire.rounds.mask import Select as Select
    from thinwire.rounds.mean import Bounded as Bounded
    from thinwire.rounds.mean import ByNorm as ByNorm
    from thinwire.rounds.mean import Median as Median
    from thinwire.rounds.mean import TrimmedMean as TrimmedMean
    from thinwire.rounds.mean import WeightedMean as WeightedMean
    from thinwire.rounds.method import Method as Method
    from thinwire.rounds.robust import CenteredClipping as CenteredClipping
    from thinwire.rounds.robust import GeometricMedian as GeometricMedian
    from thinwire.rounds.robust import MultiKrum as MultiKrum
    from thinwire.rounds.stage import Stage as Stage
    from thinwire.rounds.weigh import BySamples as BySamples
    from thinwire.rounds.weigh import Uniform as Uniform
    from thinwire.run.config import Experiment as Experiment
    from thinwire.run.config import resolve as resolve
    from thinwire.run.report import report as report
    from thinwire.run.simulate import Run as Run
    from thinwire.run.simulate import simulate as simulate
    from thinwire.schedules.base import Every as Every
    from thinwire.schedules.base import Plan as Plan
    from thinwire.schedules.lama import FedLAMA as FedLAMA
    from thinwire.sketches.base import Identity as Identity
    from thinwire.sketches.evofed import EvoFed as EvoFed
    from thinwire.spaces.factorized import FactorizedFL as FactorizedFL
    from thinwire.spaces.fedpara import FedPara as FedPara
    from thinwire.spaces.frozen import Frozen as Frozen
    from thinwire.spaces.full import Full as Full
    from thinwire.spaces.lora import LoRA as LoRA
    from thinwire.spaces.lowrank import LowRank as LowRank
    from thinwire.spaces.lowrank import Pufferfish as Pufferfish
    from thinwire.spaces.projection import MAPA as MAPA
    from thinwire.spaces.projection import MAPAX as MAPAX
    from thinwire.spaces.projection import MAPO as MAPO
    from thinwire.spaces.route import Route as Route
    from thinwire.tasks.base import Task as Task

# Where each public name lives; a test holds this list against the imports above.
_HOMES = {
    "thinwire.codecs.base": ("Codec", "Peer", "Raw"),
    "thinwire.codecs.byblock": ("ByBlock",),
    "thinwire.codecs.chain": ("Chain",),
    "thinwire.codecs.feedback": ("ErrorFeedback",),
    "thinwire.codecs.quantise": ("Quantise",),
    "thinwire.codecs.rank": ("RankSlice",),
    "thinwire.codecs.sparse": ("Masked", "RandomK", "Threshold", "TopK"),
    "thinwire.core.registry": ("register",),
    "thinwire.core.rng": ("Key",),
    "thinwire.core.spec": ("Spec",),
    "thinwire.engines.job": ("Job", "RoundRecord"),
    "thinwire.engines.local": ("LocalEngine",),
    "thinwire.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "Diverged",
        "Drifted",
        "IncompatibleParts",
        "ThinwireError",
        "UnknownName",
        "WireError",
    ),
    "thinwire.optim.adaptive": ("Adagrad", "Adam", "AdamW", "Yogi"),
    "thinwire.optim.corrections": ("FedDyn", "FedNova", "FedProx", "NoCorrection", "Scaffold"),
    "thinwire.optim.penalties": ("Jacobian", "NoPenalty", "Norms"),
    "thinwire.optim.rates": ("Constant", "Cosine", "Decay", "Steps", "Warmup"),
    "thinwire.optim.sgd": ("SGD",),
    "thinwire.privacy.base": ("NoPrivacy",),
    "thinwire.privacy.dp": ("DP",),
    "thinwire.rounds.batches": ("Local",),
    "thinwire.rounds.budget": ("Budget", "Tier"),
    "thinwire.rounds.mask": ("NoMask", "Pick", "Prune", "Select"),
    "thinwire.rounds.mean": ("Bounded", "ByNorm", "Median", "TrimmedMean", "WeightedMean"),
    "thinwire.rounds.method": ("Method",),
    "thinwire.rounds.robust": ("CenteredClipping", "GeometricMedian", "MultiKrum"),
    "thinwire.rounds.stage": ("Stage",),
    "thinwire.rounds.weigh": ("BySamples", "Uniform"),
    "thinwire.run.config": ("Experiment", "resolve"),
    "thinwire.run.report": ("report",),
    "thinwire.run.simulate": ("Run", "simulate"),
    "thinwire.schedules.base": ("Every", "Plan"),
    "thinwire.schedules.lama": ("FedLAMA",),
    "thinwire.sketches.base": ("Identity",),
    "thinwire.sketches.evofed": ("EvoFed",),
    "thinwire.spaces.factorized": ("FactorizedFL",),
    "thinwire.spaces.fedpara": ("FedPara",),
    "thinwire.spaces.frozen": ("Frozen",),
    "thinwire.spaces.full": ("Full",),
    "thinwire.spaces.lora": ("LoRA",),
    "thinwire.spaces.lowrank": ("LowRank", "Pufferfish"),
    "thinwire.spaces.projection": ("MAPA", "MAPAX", "MAPO"),
    "thinwire.spaces.route": ("Route",),
    "thinwire.tasks.base": ("Task",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
