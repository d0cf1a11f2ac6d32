"""Local training of a cohort: one step, and the backends that run it for many clients."""

from thinwire.training.batches import Local as Local
from thinwire.training.own_trainer import (
    Records as Records,
    load_optimizer_tensors as load_optimizer_tensors,
    optimizer_tensors as optimizer_tensors,
)
