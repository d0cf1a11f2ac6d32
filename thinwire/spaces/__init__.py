"""Layer 1. Where we train: coordinates, and how they become weights."""

from thinwire.spaces.base import Space as Space
from thinwire.spaces.full import Full as Full
