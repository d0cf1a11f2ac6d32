"""Layer 1. What is averaged: codes of a client's change."""

from thinwire.sketches.base import Identity as Identity
from thinwire.sketches.base import Sketch as Sketch
from thinwire.sketches.evofed import EvoFed as EvoFed
