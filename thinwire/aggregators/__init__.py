"""Aggregation rules; some are robust to Byzantine clients."""

from thinwire.aggregators.base import (
    Aggregator as Aggregator,
    Bounded as Bounded,
    BySamples as BySamples,
    ClientWeight as ClientWeight,
    Uniform as Uniform,
    WeightedMean as WeightedMean,
)
from thinwire.aggregators.robust import (
    CenteredClipping as CenteredClipping,
    GeometricMedian as GeometricMedian,
    Median as Median,
    MultiKrum as MultiKrum,
    NearestMixing as NearestMixing,
    TrimmedMean as TrimmedMean,
)
