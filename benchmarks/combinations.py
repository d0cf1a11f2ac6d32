"""Sample random methods, field by field, and check that each trains or is rejected before training.

    python benchmarks/combinations.py --samples 1000 --seed 0 --jobs 2

Prints how many trained, how many were rejected and why. Anything else (a crash, a non-finite loss, an error during
training) is printed with the method and gives exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import combinations as law


def draw(rng: random.Random, plain_share: float) -> law.Choice:
    """A choice for each field; some fields are left as in FedAvg, otherwise nearly all samples would be rejected."""
    base = law.plain()
    return {
        slot: base[slot] if rng.random() < plain_share else rng.choice(list(known))
        for slot, known in law.choices().items()
    }


def outcome(choice: law.Choice) -> tuple[str, str]:
    """The outcome of a choice: (trained, refused or FAILED; and the reason)."""
    try:
        if why := law.refused(choice):
            return "refused", law.reason(why)
        law.train(choice)
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error}; with {choice}"
    return "trained", ""


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plain", type=float, default=0.4, help="probability that a field is left as in FedAvg")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    drawn = [draw(rng, options.plain) for _ in range(options.samples)]
    began = time.time()
    counts: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, result in enumerate(pool.map(outcome, drawn, chunksize=8), 1):
            counts[result] += 1
            if result[0] == "FAILED":
                print(result[1], flush=True)
            if done % 200 == 0:
                print(f"{done} of {options.samples}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    space = 1
    for known in law.choices().values():
        space *= len(known)
    print(f"{options.samples} of {space:,} methods, seed {options.seed}")
    for what in ("trained", "refused", "FAILED"):
        print(f"| {what} | {sum(n for (how, _), n in counts.items() if how == what)} | |")
    for (how, why), n in counts.most_common():
        if how == "refused":
            print(f"| | {n} | {why} |")
    sys.exit(any(how == "FAILED" for how, _ in counts))


if __name__ == "__main__":
    main()
