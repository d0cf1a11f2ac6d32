"""Metrics: functions of a model's outputs and the targets. Importing this package fills the registry."""

from thinwire.metrics import classification as classification, language as language, questions as questions
from thinwire.metrics.base import (
    Metric as Metric,
    ModelMetric as ModelMetric,
    SumMetric as SumMetric,
    metrics_by_name as metrics_by_name,
)
from thinwire.metrics.clients import summarize as summarize
from thinwire.metrics.objective import (
    Objective as Objective,
    lower_is_better as lower_is_better,
    objective_of as objective_of,
)
