"""The configuration of an experiment: the names that other modules use, gathered from the files that define them."""

from thinwire.core.registry import SLOTS as SLOTS
from thinwire.experiments.experiment import (
    Checkpointing as Checkpointing,
    Cohort as Cohort,
    Evaluation as Evaluation,
    Experiment as Experiment,
    ModelChoice as ModelChoice,
    TaskChoice as TaskChoice,
    digest as digest,
    method_table as method_table,
    to_table as to_table,
)
from thinwire.experiments.load import from_table as from_table, method_from as method_from
from thinwire.experiments.overrides import parse_overrides as parse_overrides, put as put
from thinwire.experiments.resolve import resolve as resolve
