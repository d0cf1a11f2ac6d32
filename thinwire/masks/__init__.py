"""Masks: which parameters are trained."""

from thinwire.masks.masks import NoMask as NoMask
from thinwire.masks.masks import Pick as Pick
from thinwire.masks.masks import Prune as Prune
from thinwire.masks.masks import Select as Select
