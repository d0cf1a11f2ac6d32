"""Aggregation rules; some are robust to Byzantine clients."""

from thinwire.aggregators.base import Aggregator as Aggregator
from thinwire.aggregators.base import WeightedMean as WeightedMean
from thinwire.aggregators.bounded import Bounded as Bounded
from thinwire.aggregators.by_norm import ByNorm as ByNorm
from thinwire.aggregators.client_weight import BySamples as BySamples
from thinwire.aggregators.client_weight import ClientWeight as ClientWeight
from thinwire.aggregators.client_weight import Uniform as Uniform
from thinwire.aggregators.coordinatewise import Median as Median
from thinwire.aggregators.coordinatewise import TrimmedMean as TrimmedMean
from thinwire.aggregators.flexlora import FlexLoRA as FlexLoRA
from thinwire.aggregators.mixing import NearestMixing as NearestMixing
from thinwire.aggregators.robust import CenteredClipping as CenteredClipping
from thinwire.aggregators.robust import GeometricMedian as GeometricMedian
from thinwire.aggregators.robust import MultiKrum as MultiKrum
