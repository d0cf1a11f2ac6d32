"""Masks: which parameters are trained."""

from thinwire.masks.masks import NoMask as NoMask
from thinwire.masks.masks import PruneMask as PruneMask
from thinwire.masks.masks import RandomMask as RandomMask
from thinwire.masks.masks import TopKMask as TopKMask
