"""Layer 4. Experiments as files: configuration, run directories, checkpoints, comparison."""
