"""Communication-efficient federated learning in PyTorch. Every byte of every message is counted.

    import thinwire as tw
    run = tw.simulate(model, clients, tw.methods.mapo(k=128), rounds=50, cohort=10, test=test)
    print(run.accuracy, run.bytes_total)

    run        simulate, run_task, load_run, Run, RoundRecord, report; resolve and Experiment for presets and files
    search     compare, sweep, tune: many runs, as a table, a page and the settings that they recommend
    method     methods: published methods as functions; Method: the slots that they fill
    parts      spaces, codecs, sketches, schedules, optimizers, masks, aggregators, privacy: the values of the slots
    data       data, models, metrics, Task, Local
    extend     register, load_plugins; Codec, Space, ...: the contracts of parts; testing: checks of these contracts
    errors     ThinwireError and its subclasses

This file is the public interface; everything else may change. Names are imported on first use: `import thinwire` does
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Submodules: tw.methods.mapo(k=128), tw.codecs.TopK(0.1), tw.testing.check_codec(codec).
_SUBMODULES = (
    *("methods", "spaces", "codecs", "sketches", "schedules", "optimizers", "masks", "aggregators", "privacy"),
    *("data", "models", "metrics", "testing"),
)

# The names that most scripts need, by the module that has them.
_COMMON = {
    "thinwire.experiments.simulate": ("Run", "simulate"),
    "thinwire.experiments.run_task": ("run_task",),
    "thinwire.experiments.load_run": ("load_run",),
    "thinwire.experiments.config": ("Experiment", "resolve"),
    "thinwire.reports.report": ("report",),
    "thinwire.search.compare": ("compare", "sweep"),
    "thinwire.search.table": ("Table",),
    "thinwire.search.tune": ("Tuned", "tune"),
    "thinwire.runtime": ("Job", "RoundRecord", "Speed"),
    "thinwire.simulation.engine": ("LocalEngine",),
    "thinwire.core.registry": ("register",),
    "thinwire.experiments.plugins": ("load_plugins",),
    "thinwire.data.task": ("Task",),
    "thinwire.training": ("Local", "Records", "load_optimizer_tensors", "optimizer_tensors"),
    "thinwire.protocol": ("Asynchronous", "Budget", "Method", "Stage", "Tier"),
    "thinwire.spaces": ("FedPara", "LoRA", "MAPA", "MAPO"),
    "thinwire.schedules": ("FedLAMA",),
    "thinwire.codecs": ("Chain", "ErrorFeedback", "Quantize", "TopK"),
    "thinwire.optimizers": ("Adam", "SGD"),
}

# The contracts of parts, and the types in their signatures.
_CONTRACTS = {
    "thinwire.core.key": ("Key",),
    "thinwire.core.spec": ("Spec",),
    "thinwire.core.tree": ("Tree",),
    "thinwire.spaces": ("Space",),
    "thinwire.sketches": ("Sketch",),
    "thinwire.schedules": ("Plan", "Schedule"),
    "thinwire.codecs": ("Codec", "Peer"),
    "thinwire.optimizers": ("Correction", "LRSchedule", "Optimizer", "Penalty"),
    "thinwire.masks": ("Mask",),
    "thinwire.aggregators": ("Aggregator", "ClientWeight"),
    "thinwire.privacy": ("Privacy",),
    "thinwire.metrics": ("Metric",),
    "thinwire.data.partition": ("Assignment", "Partition"),
}

_ERRORS = {
    "thinwire.errors": (
        *("CheckpointError", "ConfigError", "DataError", "Diverged", "Drifted", "IncompatibleParts"),
        *("ThinwireError", "Unfit", "UnknownName", "WireError"),
    ),
}

# Aliases of parts: the same as in their submodule, for example tw.Threshold is tw.codecs.Threshold.
_ALIASES = {
    "thinwire.spaces": (
        *(
            "DoRA",
            "FactorizedFL",
            "FedMRN",
            "FedPM",
            "Frozen",
            "Full",
            "LoRAResidual",
            "LoRASB",
            "LoRAStack",
            "LowRank",
        ),
        *("MAPAX", "Pufferfish", "Route"),
    ),
    "thinwire.sketches": ("CountSketch", "EvoFed", "Identity"),
    "thinwire.schedules": ("AllBlocks",),
    "thinwire.codecs": (
        *("Binary", "ByBlock", "Eden", "Lattice", "LatticeSum", "Masked", "OnLattice", "PowerSGD", "RandomK"),
        *("RankSlice", "Raw", "Threshold"),
    ),
    "thinwire.optimizers": (
        *("BetaPosterior",),
        *("Adagrad", "AdamW", "ForwardSGD", "Yogi", "FedDyn", "FedNova", "FedProx", "NoCorrection", "Scaffold"),
        *("Jacobian", "L1L2", "NoPenalty", "ConstantLR", "CosineLR", "ExponentialLR", "InverseTimeLR"),
        *("HalvedLR", "MultiStepLR", "WarmupLR"),
    ),
    "thinwire.masks": ("NoMask", "PruneMask", "RandomMask", "TopKMask"),
    "thinwire.aggregators": (
        *("Bounded", "ByNorm", "BySamples", "CenteredClipping", "FlexLoRA", "GeometricMedian", "Median", "MultiKrum"),
        *("NearestMixing", "TrimmedMean", "Uniform", "WeightedMean"),
    ),
    "thinwire.privacy": ("DP", "NoPrivacy"),
}

_HOME_OF = {
    name: home for group in (_COMMON, _CONTRACTS, _ERRORS, _ALIASES) for home, names in group.items() for name in names
}
__all__ = sorted((*_HOME_OF, *_SUBMODULES, "__version__"))
__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("thinwire.core.text").version()
    if name in _SUBMODULES:
        return importlib.import_module(f"thinwire.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


# For type checkers; a test compares these names with the ones above.
if TYPE_CHECKING:
    from thinwire import aggregators as aggregators
    from thinwire import codecs as codecs
    from thinwire import data as data
    from thinwire import masks as masks
    from thinwire import methods as methods
    from thinwire import metrics as metrics
    from thinwire import models as models
    from thinwire import optimizers as optimizers
    from thinwire import privacy as privacy
    from thinwire import schedules as schedules
    from thinwire import sketches as sketches
    from thinwire import spaces as spaces
    from thinwire import testing as testing
    from thinwire.aggregators import Aggregator as Aggregator
    from thinwire.aggregators import Bounded as Bounded
    from thinwire.aggregators import ByNorm as ByNorm
    from thinwire.aggregators import BySamples as BySamples
    from thinwire.aggregators import CenteredClipping as CenteredClipping
    from thinwire.aggregators import ClientWeight as ClientWeight
    from thinwire.aggregators import FlexLoRA as FlexLoRA
    from thinwire.aggregators import GeometricMedian as GeometricMedian
    from thinwire.aggregators import Median as Median
    from thinwire.aggregators import MultiKrum as MultiKrum
    from thinwire.aggregators import NearestMixing as NearestMixing
    from thinwire.aggregators import TrimmedMean as TrimmedMean
    from thinwire.aggregators import Uniform as Uniform
    from thinwire.aggregators import WeightedMean as WeightedMean
    from thinwire.codecs import Binary as Binary
    from thinwire.codecs import ByBlock as ByBlock
    from thinwire.codecs import Chain as Chain
    from thinwire.codecs import Codec as Codec
    from thinwire.codecs import Eden as Eden
    from thinwire.codecs import ErrorFeedback as ErrorFeedback
    from thinwire.codecs import Lattice as Lattice
    from thinwire.codecs import LatticeSum as LatticeSum
    from thinwire.codecs import Masked as Masked
    from thinwire.codecs import OnLattice as OnLattice
    from thinwire.codecs import Peer as Peer
    from thinwire.codecs import PowerSGD as PowerSGD
    from thinwire.codecs import Quantize as Quantize
    from thinwire.codecs import RandomK as RandomK
    from thinwire.codecs import RankSlice as RankSlice
    from thinwire.codecs import Raw as Raw
    from thinwire.codecs import Threshold as Threshold
    from thinwire.codecs import TopK as TopK
    from thinwire.core.key import Key as Key
    from thinwire.core.registry import register as register
    from thinwire.core.spec import Spec as Spec
    from thinwire.core.tree import Tree as Tree
    from thinwire.data.partition import Assignment as Assignment
    from thinwire.data.partition import Partition as Partition
    from thinwire.data.task import Task as Task
    from thinwire.errors import CheckpointError as CheckpointError
    from thinwire.errors import ConfigError as ConfigError
    from thinwire.errors import DataError as DataError
    from thinwire.errors import Diverged as Diverged
    from thinwire.errors import Drifted as Drifted
    from thinwire.errors import IncompatibleParts as IncompatibleParts
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.errors import Unfit as Unfit
    from thinwire.errors import UnknownName as UnknownName
    from thinwire.errors import WireError as WireError
    from thinwire.experiments.config import Experiment as Experiment
    from thinwire.experiments.config import resolve as resolve
    from thinwire.experiments.load_run import load_run as load_run
    from thinwire.experiments.plugins import load_plugins as load_plugins
    from thinwire.experiments.run_task import run_task as run_task
    from thinwire.experiments.simulate import Run as Run
    from thinwire.experiments.simulate import simulate as simulate
    from thinwire.masks import Mask as Mask
    from thinwire.masks import NoMask as NoMask
    from thinwire.masks import PruneMask as PruneMask
    from thinwire.masks import RandomMask as RandomMask
    from thinwire.masks import TopKMask as TopKMask
    from thinwire.metrics import Metric as Metric
    from thinwire.optimizers import L1L2 as L1L2
    from thinwire.optimizers import SGD as SGD
    from thinwire.optimizers import Adagrad as Adagrad
    from thinwire.optimizers import Adam as Adam
    from thinwire.optimizers import AdamW as AdamW
    from thinwire.optimizers import BetaPosterior as BetaPosterior
    from thinwire.optimizers import ConstantLR as ConstantLR
    from thinwire.optimizers import Correction as Correction
    from thinwire.optimizers import CosineLR as CosineLR
    from thinwire.optimizers import ExponentialLR as ExponentialLR
    from thinwire.optimizers import FedDyn as FedDyn
    from thinwire.optimizers import FedNova as FedNova
    from thinwire.optimizers import FedProx as FedProx
    from thinwire.optimizers import ForwardSGD as ForwardSGD
    from thinwire.optimizers import HalvedLR as HalvedLR
    from thinwire.optimizers import InverseTimeLR as InverseTimeLR
    from thinwire.optimizers import Jacobian as Jacobian
    from thinwire.optimizers import LRSchedule as LRSchedule
    from thinwire.optimizers import MultiStepLR as MultiStepLR
    from thinwire.optimizers import NoCorrection as NoCorrection
    from thinwire.optimizers import NoPenalty as NoPenalty
    from thinwire.optimizers import Optimizer as Optimizer
    from thinwire.optimizers import Penalty as Penalty
    from thinwire.optimizers import Scaffold as Scaffold
    from thinwire.optimizers import WarmupLR as WarmupLR
    from thinwire.optimizers import Yogi as Yogi
    from thinwire.privacy import DP as DP
    from thinwire.privacy import NoPrivacy as NoPrivacy
    from thinwire.privacy import Privacy as Privacy
    from thinwire.protocol import Asynchronous as Asynchronous
    from thinwire.protocol import Budget as Budget
    from thinwire.protocol import Method as Method
    from thinwire.protocol import Stage as Stage
    from thinwire.protocol import Tier as Tier
    from thinwire.reports.report import report as report
    from thinwire.runtime import Job as Job
    from thinwire.runtime import RoundRecord as RoundRecord
    from thinwire.runtime import Speed as Speed
    from thinwire.schedules import AllBlocks as AllBlocks
    from thinwire.schedules import FedLAMA as FedLAMA
    from thinwire.schedules import Plan as Plan
    from thinwire.schedules import Schedule as Schedule
    from thinwire.search.compare import compare as compare
    from thinwire.search.compare import sweep as sweep
    from thinwire.search.table import Table as Table
    from thinwire.search.tune import Tuned as Tuned
    from thinwire.search.tune import tune as tune
    from thinwire.simulation.engine import LocalEngine as LocalEngine
    from thinwire.sketches import CountSketch as CountSketch
    from thinwire.sketches import EvoFed as EvoFed
    from thinwire.sketches import Identity as Identity
    from thinwire.sketches import Sketch as Sketch
    from thinwire.spaces import MAPA as MAPA
    from thinwire.spaces import MAPAX as MAPAX
    from thinwire.spaces import MAPO as MAPO
    from thinwire.spaces import DoRA as DoRA
    from thinwire.spaces import FactorizedFL as FactorizedFL
    from thinwire.spaces import FedMRN as FedMRN
    from thinwire.spaces import FedPara as FedPara
    from thinwire.spaces import FedPM as FedPM
    from thinwire.spaces import Frozen as Frozen
    from thinwire.spaces import Full as Full
    from thinwire.spaces import LoRA as LoRA
    from thinwire.spaces import LoRAResidual as LoRAResidual
    from thinwire.spaces import LoRASB as LoRASB
    from thinwire.spaces import LoRAStack as LoRAStack
    from thinwire.spaces import LowRank as LowRank
    from thinwire.spaces import Pufferfish as Pufferfish
    from thinwire.spaces import Route as Route
    from thinwire.spaces import Space as Space
    from thinwire.training import Local as Local
    from thinwire.training import Records as Records
    from thinwire.training import load_optimizer_tensors as load_optimizer_tensors
    from thinwire.training import optimizer_tensors as optimizer_tensors
