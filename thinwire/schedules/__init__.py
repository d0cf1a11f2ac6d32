"""Schedules: which blocks are synchronized in which round."""

from thinwire.schedules.base import AllBlocks as AllBlocks, Plan as Plan, Schedule as Schedule
from thinwire.schedules.lama import FedLAMA as FedLAMA
