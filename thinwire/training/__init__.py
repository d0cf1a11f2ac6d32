"""Local training of a cohort: one step, and the backends that run it for many clients."""

from thinwire.training.batches import Local as Local
from thinwire.training.own_trainer import (
    Records as Records,
)
