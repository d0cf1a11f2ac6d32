"""Layer 1. How numbers are moved: optimisers for both ends, and corrections of local steps."""

from thinwire.optim.base import Correction as Correction
from thinwire.optim.base import Optimiser as Optimiser
from thinwire.optim.corrections import NoCorrection as NoCorrection
from thinwire.optim.sgd import SGD as SGD
