"""Layer 2. The round: a method, the states of server and clients, and the functions that every engine calls."""

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
