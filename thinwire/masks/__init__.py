"""Masks: which coordinates are trained, and which the server sets to zero."""

from thinwire.masks.adapters import dead_adapters as dead_adapters
from thinwire.masks.adapters import nonzero_b as nonzero_b
from thinwire.masks.base import Mask as Mask
from thinwire.masks.base import NoMask as NoMask
from thinwire.masks.prune import PruneMask as PruneMask
from thinwire.masks.random import RandomMask as RandomMask
from thinwire.masks.topk import TopKMask as TopKMask
