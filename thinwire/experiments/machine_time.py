"""Seconds on the clock and seconds of processor time since a point in time, for `environment.json` of a run.

Their quotient shows whether other processes slowed the run down (`reports/timing.py`).
"""

from __future__ import annotations

import time


class MachineTime:
    """Both times since its creation.

    >>> since = MachineTime()
    >>> sorted(since.facts())
    ['processor_seconds', 'wall_seconds']
    """

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def facts(self) -> dict[str, float]:
        """The seconds so far; processor time is that of all threads of this process."""
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        return {"wall_seconds": round(wall, 3), "processor_seconds": round(processor, 3)}
