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
    from thinwire.aggregators.base import Bounded as Bounded
    from thinwire.aggregators.base import ByNorm as ByNorm
    from thinwire.aggregators.base import Median as Median
    from thinwire.aggregators.base import TrimmedMean as TrimmedMean
    from thinwire.aggregators.base import WeightedMean as WeightedMean
    from thinwire.aggregators.client_weight import BySamples as BySamples
    from thinwire.aggregators.client_weight import Uniform as Uniform
    from thinwire.aggregators.robust import CenteredClipping as CenteredClipping
    from thinwire.aggregators.robust import GeometricMedian as GeometricMedian
    from thinwire.aggregators.robust import MultiKrum as MultiKrum
    from thinwire.codecs.base import Codec as Codec
    from thinwire.codecs.base import Peer as Peer
    from thinwire.codecs.base import Raw as Raw
    from thinwire.codecs.by_block import ByBlock as ByBlock
    from thinwire.codecs.chain import Chain as Chain
    from thinwire.codecs.error_feedback import ErrorFeedback as ErrorFeedback
    from thinwire.codecs.quantize import Quantize as Quantize
    from thinwire.codecs.rank_slice import RankSlice as RankSlice
    from thinwire.codecs.sparse import Masked as Masked
    from thinwire.codecs.sparse import RandomK as RandomK
    from thinwire.codecs.sparse import Threshold as Threshold
    from thinwire.codecs.sparse import TopK as TopK
    from thinwire.core.key import Key as Key
    from thinwire.core.registry import register as register
    from thinwire.core.spec import Spec as Spec
    from thinwire.data.task import Task as Task
    from thinwire.errors import CheckpointError as CheckpointError
    from thinwire.errors import ConfigError as ConfigError
    from thinwire.errors import DataError as DataError
    from thinwire.errors import Diverged as Diverged
    from thinwire.errors import Drifted as Drifted
    from thinwire.errors import IncompatibleParts as IncompatibleParts
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.errors import UnknownName as UnknownName
    from thinwire.errors import WireError as WireError
    from thinwire.experiments.config import Experiment as Experiment
    from thinwire.experiments.config import resolve as resolve
    from thinwire.experiments.simulate import Run as Run
    from thinwire.experiments.simulate import simulate as simulate
    from thinwire.masks import NoMask as NoMask
    from thinwire.masks import PruneMask as PruneMask
    from thinwire.masks import RandomMask as RandomMask
    from thinwire.masks import TopKMask as TopKMask
    from thinwire.optimizers.adaptive import Adagrad as Adagrad
    from thinwire.optimizers.adaptive import Adam as Adam
    from thinwire.optimizers.adaptive import AdamW as AdamW
    from thinwire.optimizers.adaptive import Yogi as Yogi
    from thinwire.optimizers.corrections import FedDyn as FedDyn
    from thinwire.optimizers.corrections import FedNova as FedNova
    from thinwire.optimizers.corrections import FedProx as FedProx
    from thinwire.optimizers.corrections import NoCorrection as NoCorrection
    from thinwire.optimizers.corrections import Scaffold as Scaffold
    from thinwire.optimizers.lr_schedules import ConstantLR as ConstantLR
    from thinwire.optimizers.lr_schedules import CosineLR as CosineLR
    from thinwire.optimizers.lr_schedules import ExponentialLR as ExponentialLR
    from thinwire.optimizers.lr_schedules import MultiStepLR as MultiStepLR
    from thinwire.optimizers.lr_schedules import WarmupLR as WarmupLR
    from thinwire.optimizers.penalties import L1L2 as L1L2
    from thinwire.optimizers.penalties import Jacobian as Jacobian
    from thinwire.optimizers.penalties import NoPenalty as NoPenalty
    from thinwire.optimizers.sgd import SGD as SGD
    from thinwire.privacy.base import NoPrivacy as NoPrivacy
    from thinwire.privacy.dp import DP as DP
    from thinwire.protocol.budget import Budget as Budget
    from thinwire.protocol.budget import Tier as Tier
    from thinwire.protocol.method import Method as Method
    from thinwire.protocol.stage import Stage as Stage
    from thinwire.reports.report import report as report
    from thinwire.runtime.job import Job as Job
    from thinwire.runtime.job import RoundRecord as RoundRecord
    from thinwire.schedules.base import AllBlocks as AllBlocks
    from thinwire.schedules.base import Plan as Plan
    from thinwire.schedules.lama import FedLAMA as FedLAMA
    from thinwire.simulation.engine import LocalEngine as LocalEngine
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
    from thinwire.training.batches import Local as Local

# Where each public name lives; a test holds this list against the imports above.
_HOMES = {
    "thinwire.codecs.base": ("Codec", "Peer", "Raw"),
    "thinwire.codecs.by_block": ("ByBlock",),
    "thinwire.codecs.chain": ("Chain",),
    "thinwire.codecs.error_feedback": ("ErrorFeedback",),
    "thinwire.codecs.quantize": ("Quantize",),
    "thinwire.codecs.rank_slice": ("RankSlice",),
    "thinwire.codecs.sparse": ("Masked", "RandomK", "Threshold", "TopK"),
    "thinwire.core.registry": ("register",),
    "thinwire.core.key": ("Key",),
    "thinwire.core.spec": ("Spec",),
    "thinwire.runtime.job": ("Job", "RoundRecord"),
    "thinwire.simulation.engine": ("LocalEngine",),
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
    "thinwire.optimizers.adaptive": ("Adagrad", "Adam", "AdamW", "Yogi"),
    "thinwire.optimizers.corrections": ("FedDyn", "FedNova", "FedProx", "NoCorrection", "Scaffold"),
    "thinwire.optimizers.penalties": ("Jacobian", "NoPenalty", "L1L2"),
    "thinwire.optimizers.lr_schedules": ("ConstantLR", "CosineLR", "ExponentialLR", "MultiStepLR", "WarmupLR"),
    "thinwire.optimizers.sgd": ("SGD",),
    "thinwire.privacy.base": ("NoPrivacy",),
    "thinwire.privacy.dp": ("DP",),
    "thinwire.training.batches": ("Local",),
    "thinwire.protocol.budget": ("Budget", "Tier"),
    "thinwire.masks.masks": ("NoMask", "RandomMask", "PruneMask", "TopKMask"),
    "thinwire.aggregators.base": ("Bounded", "ByNorm", "Median", "TrimmedMean", "WeightedMean"),
    "thinwire.protocol.method": ("Method",),
    "thinwire.aggregators.robust": ("CenteredClipping", "GeometricMedian", "MultiKrum"),
    "thinwire.protocol.stage": ("Stage",),
    "thinwire.aggregators.client_weight": ("BySamples", "Uniform"),
    "thinwire.experiments.config": ("Experiment", "resolve"),
    "thinwire.reports.report": ("report",),
    "thinwire.experiments.simulate": ("Run", "simulate"),
    "thinwire.schedules.base": ("AllBlocks", "Plan"),
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
    "thinwire.data.task": ("Task",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
