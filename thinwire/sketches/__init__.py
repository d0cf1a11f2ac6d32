"""Sketches: codes of client updates that can be averaged."""

from thinwire.sketches.base import Identity as Identity, Sketch as Sketch
from thinwire.sketches.count import CountSketch as CountSketch
from thinwire.sketches.evofed import EvoFed as EvoFed
