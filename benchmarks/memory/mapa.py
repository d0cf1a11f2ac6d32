"""Train MAPA on the CIFAR network without storing its basis, and print the peak memory of the process.

    python benchmarks/memory/mapa.py --p 1024

The basis would have p x 1,146,634 values (4.7 GB at p = 1,024). Needs CIFAR-10 in THINWIRE_DATA.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path

from thinwire.runs.config import resolve
from thinwire.runs.execute import execute


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=int, default=1024)
    parser.add_argument("--entries", default="sign")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cohort", type=int, default=2)
    options = parser.parse_args()
    settings = {
        "method.space.p": options.p,
        "method.space.entries": options.entries,
        "rounds": 1,
        "cohort.size": options.cohort,
        "local.steps": options.steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        summary = execute(resolve("mapa", on="cifar10", overrides=settings), Path(folder) / "run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    keep = ("trainable", "parameters", "bytes_up", "final_loss", "seconds")
    print(json.dumps({**settings, **{k: summary[k] for k in keep}, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
