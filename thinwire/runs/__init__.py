"""Experiments: configuration, presets, run directories, checkpoints, the round loop, grids and the tuner."""
