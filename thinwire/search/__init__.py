"""Many runs: tables of runs, sweeps, and searches for settings or methods."""
