"""Schedules: which blocks are synchronized in which round."""

from thinwire.schedules.base import AllBlocks as AllBlocks
from thinwire.schedules.base import Plan as Plan
from thinwire.schedules.base import Schedule as Schedule
from thinwire.schedules.lama import FedLAMA as FedLAMA
