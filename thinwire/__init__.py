"""Communication-efficient federated learning in PyTorch. Every byte of every message is counted.

    import thinwire as tw
    run = tw.simulate(model, clients, tw.methods.mapo(k=128), rounds=50, cohort=10, test=test)
    print(run.accuracy, run.bytes_total)

    run        simulate, run, load_run, Run, RoundRecord, report; resolve, Settings and Options
    search     compare, sweep, tune: many runs, as a table, a page and the settings that they recommend
    method     methods: published methods as functions; Method: the slots that they fill
    parts      spaces, codecs, sketches, schedules, optimizers, masks, aggregators, privacy: the values of the slots
    data       data, models, metrics, Task, Source, Local
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
    *("data", "models", "metrics", "testing", "errors"),
)

# The names by the module that has them.
_NAMES = {
    "thinwire.aggregators": "Aggregator ClientWeight",
    "thinwire.codecs": "Codec Peer",
    "thinwire.core.key": "Key",
    "thinwire.core.registry": "register",
    "thinwire.core.tree": "Spec Tree",
    "thinwire.data.examples": "Source",
    "thinwire.data.partition": "Assignment Partition",
    "thinwire.data.task": "Task",
    "thinwire.errors": "CheckpointError ConfigError DataError Diverged IncompatibleParts ThinwireError WireError",
    "thinwire.federation": "RoundRecord Speed",
    "thinwire.federation.settings": "Settings",
    "thinwire.masks": "Mask",
    "thinwire.metrics": "Metric",
    "thinwire.optimizers": "Correction LRSchedule Optimizer Penalty",
    "thinwire.privacy": "Privacy",
    "thinwire.protocol": "Asynchronous Budget Method Stage Tier",
    "thinwire.reports.report": "report",
    "thinwire.reports.table": "Table",
    "thinwire.runs.config": "resolve",
    "thinwire.runs.options": "Options",
    "thinwire.runs.plugins": "load_plugins",
    "thinwire.runs.result": "Run load_run",
    "thinwire.runs.run": "run simulate",
    "thinwire.schedules": "Plan Schedule",
    "thinwire.search.compare": "compare sweep",
    "thinwire.search.tune": "Tuned tune",
    "thinwire.sketches": "Sketch",
    "thinwire.spaces": "Space",
    "thinwire.training": "Local Records",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}
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
    from thinwire import (
        aggregators as aggregators,
        codecs as codecs,
        data as data,
        errors as errors,
        masks as masks,
        methods as methods,
        metrics as metrics,
        models as models,
        optimizers as optimizers,
        privacy as privacy,
        schedules as schedules,
        sketches as sketches,
        spaces as spaces,
        testing as testing,
    )
    from thinwire.aggregators import Aggregator as Aggregator, ClientWeight as ClientWeight
    from thinwire.codecs import Codec as Codec, Peer as Peer
    from thinwire.core.key import Key as Key
    from thinwire.core.registry import register as register
    from thinwire.core.tree import Spec as Spec, Tree as Tree
    from thinwire.data.examples import Source as Source
    from thinwire.data.partition import Assignment as Assignment, Partition as Partition
    from thinwire.data.task import Task as Task
    from thinwire.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        Diverged as Diverged,
        IncompatibleParts as IncompatibleParts,
        ThinwireError as ThinwireError,
        WireError as WireError,
    )
    from thinwire.federation import RoundRecord as RoundRecord, Speed as Speed
    from thinwire.federation.settings import Settings as Settings
    from thinwire.masks import Mask as Mask
    from thinwire.metrics import Metric as Metric
    from thinwire.optimizers import (
        Correction as Correction,
        LRSchedule as LRSchedule,
        Optimizer as Optimizer,
        Penalty as Penalty,
    )
    from thinwire.privacy import Privacy as Privacy
    from thinwire.protocol import (
        Asynchronous as Asynchronous,
        Budget as Budget,
        Method as Method,
        Stage as Stage,
        Tier as Tier,
    )
    from thinwire.reports.report import report as report
    from thinwire.reports.table import Table as Table
    from thinwire.runs.config import resolve as resolve
    from thinwire.runs.options import Options as Options
    from thinwire.runs.plugins import load_plugins as load_plugins
    from thinwire.runs.result import Run as Run, load_run as load_run
    from thinwire.runs.run import run as run, simulate as simulate
    from thinwire.schedules import Plan as Plan, Schedule as Schedule
    from thinwire.search.compare import compare as compare, sweep as sweep
    from thinwire.search.tune import Tuned as Tuned, tune as tune
    from thinwire.sketches import Sketch as Sketch
    from thinwire.spaces import Space as Space
    from thinwire.training import (
        Local as Local,
        Records as Records,
    )
