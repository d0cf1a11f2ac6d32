"""The configuration of an experiment: the names that other modules use, gathered from the files that define them."""

from thinwire.core.registry import SLOTS as SLOTS
from thinwire.experiments.experiment import Checkpointing as Checkpointing
from thinwire.experiments.experiment import Cohort as Cohort
from thinwire.experiments.experiment import Evaluation as Evaluation
from thinwire.experiments.experiment import Experiment as Experiment
from thinwire.experiments.experiment import ModelChoice as ModelChoice
from thinwire.experiments.experiment import TaskChoice as TaskChoice
from thinwire.experiments.experiment import digest as digest
from thinwire.experiments.experiment import method_table as method_table
from thinwire.experiments.experiment import to_table as to_table
from thinwire.experiments.load import from_table as from_table
from thinwire.experiments.load import method_from as method_from
from thinwire.experiments.overrides import parse_overrides as parse_overrides
from thinwire.experiments.overrides import put as put
from thinwire.experiments.resolve import resolve as resolve
