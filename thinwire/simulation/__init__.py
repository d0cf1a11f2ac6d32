"""Simulation of a federation on one machine."""

from thinwire.simulation.engine import LocalEngine as LocalEngine
