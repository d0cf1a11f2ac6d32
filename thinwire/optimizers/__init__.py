"""Optimizers for clients and server, learning-rate schedules, corrections of client drift, and penalties."""

from thinwire.core.tree import ALL_BLOCKS as ALL_BLOCKS, State as State
from thinwire.optimizers.adaptive import (
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    BetaPosterior as BetaPosterior,
    Muon as Muon,
    Yogi as Yogi,
)
from thinwire.optimizers.base import (
    SGD as SGD,
    Correction as Correction,
    Optimizer as Optimizer,
    clip_by_global_norm as clip_by_global_norm,
)
from thinwire.optimizers.corrections import (
    FedDyn as FedDyn,
    FedNova as FedNova,
    FedProx as FedProx,
    NoCorrection as NoCorrection,
    Scaffold as Scaffold,
)
from thinwire.optimizers.forward import ForwardSGD as ForwardSGD
from thinwire.optimizers.lr_schedules import (
    ConstantLR as ConstantLR,
    CosineLR as CosineLR,
    ExponentialLR as ExponentialLR,
    LRSchedule as LRSchedule,
    MultiStepLR as MultiStepLR,
    WarmupLR as WarmupLR,
)
from thinwire.optimizers.penalties import L1L2 as L1L2, Jacobian as Jacobian, NoPenalty as NoPenalty, Penalty as Penalty
