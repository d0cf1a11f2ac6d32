"""Laboratory for papers, not part of the wheel: published tables beside ours, frontiers, grids. `python -m papers`."""
