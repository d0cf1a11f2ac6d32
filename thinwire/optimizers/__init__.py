"""Optimizers for clients and server, learning-rate schedules, corrections of client drift, and penalties."""

from thinwire.core.state import ALL_BLOCKS as ALL_BLOCKS
from thinwire.core.state import State as State
from thinwire.optimizers.adaptive import Adagrad as Adagrad
from thinwire.optimizers.adaptive import Adam as Adam
from thinwire.optimizers.adaptive import AdamW as AdamW
from thinwire.optimizers.adaptive import Yogi as Yogi
from thinwire.optimizers.base import Correction as Correction
from thinwire.optimizers.base import Optimizer as Optimizer
from thinwire.optimizers.clip import clip_by_global_norm as clip_by_global_norm
from thinwire.optimizers.corrections import FedDyn as FedDyn
from thinwire.optimizers.corrections import FedNova as FedNova
from thinwire.optimizers.corrections import FedProx as FedProx
from thinwire.optimizers.corrections import NoCorrection as NoCorrection
from thinwire.optimizers.corrections import Scaffold as Scaffold
from thinwire.optimizers.lr_schedules import ConstantLR as ConstantLR
from thinwire.optimizers.lr_schedules import CosineLR as CosineLR
from thinwire.optimizers.lr_schedules import ExponentialLR as ExponentialLR
from thinwire.optimizers.lr_schedules import InverseTimeLR as InverseTimeLR
from thinwire.optimizers.lr_schedules import LRSchedule as LRSchedule
from thinwire.optimizers.lr_schedules import MultiStepLR as MultiStepLR
from thinwire.optimizers.lr_schedules import WarmupLR as WarmupLR
from thinwire.optimizers.penalties import L1L2 as L1L2
from thinwire.optimizers.penalties import Jacobian as Jacobian
from thinwire.optimizers.penalties import NoPenalty as NoPenalty
from thinwire.optimizers.penalties import Penalty as Penalty
from thinwire.optimizers.sgd import SGD as SGD
