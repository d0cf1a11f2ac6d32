"""Layer 1. How numbers are moved: optimisers for both ends, corrections of local steps, penalties."""

from thinwire.optimizers.adaptive import Adagrad as Adagrad
from thinwire.optimizers.adaptive import Adam as Adam
from thinwire.optimizers.adaptive import AdamW as AdamW
from thinwire.optimizers.adaptive import Yogi as Yogi
from thinwire.optimizers.base import Correction as Correction
from thinwire.optimizers.base import Optimiser as Optimiser
from thinwire.optimizers.corrections import FedDyn as FedDyn
from thinwire.optimizers.corrections import FedNova as FedNova
from thinwire.optimizers.corrections import FedProx as FedProx
from thinwire.optimizers.corrections import NoCorrection as NoCorrection
from thinwire.optimizers.corrections import Scaffold as Scaffold
from thinwire.optimizers.lr_schedules import Constant as Constant
from thinwire.optimizers.lr_schedules import Cosine as Cosine
from thinwire.optimizers.lr_schedules import Decay as Decay
from thinwire.optimizers.lr_schedules import Rate as Rate
from thinwire.optimizers.lr_schedules import Steps as Steps
from thinwire.optimizers.lr_schedules import Warmup as Warmup
from thinwire.optimizers.penalties import Jacobian as Jacobian
from thinwire.optimizers.penalties import NoPenalty as NoPenalty
from thinwire.optimizers.penalties import Norms as Norms
from thinwire.optimizers.penalties import Penalty as Penalty
from thinwire.optimizers.sgd import SGD as SGD
