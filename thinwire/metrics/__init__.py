"""Metrics: functions of a model's outputs and the targets. Importing this package fills the registry."""

from thinwire.metrics import classification as classification
from thinwire.metrics import language as language
from thinwire.metrics import multilabel as multilabel
from thinwire.metrics import questions as questions
from thinwire.metrics import regression as regression
from thinwire.metrics.base import Metric as Metric
from thinwire.metrics.base import ModelMetric as ModelMetric
from thinwire.metrics.base import SumMetric as SumMetric
from thinwire.metrics.base import metrics_by_name as metrics_by_name
from thinwire.metrics.clients import ClientSummary as ClientSummary
from thinwire.metrics.clients import summarize as summarize
from thinwire.metrics.objective import Objective as Objective
from thinwire.metrics.objective import lower_is_better as lower_is_better
from thinwire.metrics.objective import objective_of as objective_of
