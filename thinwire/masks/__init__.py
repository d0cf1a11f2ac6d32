"""Masks: which coordinates are trained, and which the server sets to zero."""

from thinwire.masks.base import Mask as Mask, NoMask as NoMask
from thinwire.masks.topk import (
    PruneMask as PruneMask,
    RandomMask as RandomMask,
    TopKMask as TopKMask,
    TurnsMask as TurnsMask,
    nonzero_b as nonzero_b,
)
