"""Local training of a cohort: one step, and the backends that run it for many clients."""

from thinwire.training.batches import Local as Local
from thinwire.training.optimizer_tensors import load_optimizer_tensors as load_optimizer_tensors
from thinwire.training.optimizer_tensors import optimizer_tensors as optimizer_tensors
from thinwire.training.records import Records as Records
