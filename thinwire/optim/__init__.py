"""Layer 1. How numbers are moved: optimisers for both ends, corrections of local steps, penalties."""

from thinwire.optim.adaptive import Adagrad as Adagrad
from thinwire.optim.adaptive import Adam as Adam
from thinwire.optim.adaptive import AdamW as AdamW
from thinwire.optim.adaptive import Yogi as Yogi
from thinwire.optim.base import Correction as Correction
from thinwire.optim.base import Optimiser as Optimiser
from thinwire.optim.corrections import FedDyn as FedDyn
from thinwire.optim.corrections import FedNova as FedNova
from thinwire.optim.corrections import FedProx as FedProx
from thinwire.optim.corrections import NoCorrection as NoCorrection
from thinwire.optim.corrections import Scaffold as Scaffold
from thinwire.optim.penalties import Jacobian as Jacobian
from thinwire.optim.penalties import NoPenalty as NoPenalty
from thinwire.optim.penalties import Norms as Norms
from thinwire.optim.penalties import Penalty as Penalty
from thinwire.optim.rates import Constant as Constant
from thinwire.optim.rates import Cosine as Cosine
from thinwire.optim.rates import Decay as Decay
from thinwire.optim.rates import Rate as Rate
from thinwire.optim.rates import Steps as Steps
from thinwire.optim.rates import Warmup as Warmup
from thinwire.optim.sgd import SGD as SGD
