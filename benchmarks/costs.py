"""Message sizes of each preset in a round, for the method pages.

    python benchmarks/costs.py                  # print the tables
    python benchmarks/costs.py --docs docs      # write them into docs/methods

The model is that of the digits (64-64-10, 4,810 weights). Sizes are those of `thinwire check PRESET --on digits` if
they do not depend on the values; otherwise those of the third round of `thinwire run PRESET --on digits`, as means over
its clients, marked by a tilde. Catch-up is not included.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.experiments.build import build_job
from thinwire.experiments.check import check
from thinwire.experiments.config import resolve
from thinwire.experiments.presets import presets

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.page import write_part

COMMAND = "python benchmarks/costs.py --docs docs"
HEAD = "| preset | trained parameters | bytes up | bytes down | total, % of FedAvg |\n|---|---|---|---|---|"


class Cost(NamedTuple):
    """Trained parameters, upload and download of a client in a round; exact or measured."""

    trained: int
    up: int
    down: int
    exact: bool


def cost(name: str, measure: bool = True) -> Cost | None:
    """The cost of a preset; None if it depends on the values and `measure` is False."""
    experiment = resolve(name, "digits", {"engine.backend": "vmap"})
    facts = check(experiment)
    up, down, trained = facts["bytes_up_per_client"], facts["bytes_down_per_client"], facts["trainable"]
    if up is not None and down is not None:
        return Cost(trained, up, down, True)
    if not measure:
        return None
    third = next(itertools.islice(experiment.engine.run(build_job(experiment)), 2, None))
    return Cost(trained, round(third.bytes_up / third.clients), round(third.bytes_down / third.clients), False)


def line(name: str, found: Cost, plain: Cost) -> str:
    """The row of a preset."""
    about = "" if found.exact else "~ "
    share = (found.up + found.down) / (plain.up + plain.down)
    return f"| `{name}` | {found.trained:,} | {about}{found.up:,} | {about}{found.down:,} | {100 * share:.1f} % |"


def described(page: str) -> list[str]:
    """The presets in the headings of a page."""
    heads = re.findall(r"^#{2,3} .*$", page, re.M)
    known = presets("methods")
    return [name for head in heads for name in re.findall(r"`([a-z0-9-]+)`", head) if name in known]


def table(names: Sequence[str]) -> str:
    """The table of some presets."""
    plain = cost("fedavg")
    assert plain
    return "\n".join([HEAD, *(line(name, found, plain) for name in names if (found := cost(name)))])


def main() -> None:
    """Print the tables, or with --docs write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the documentation folder")
    docs = parser.parse_args().docs
    for page in sorted(((docs or Path("docs")) / "methods").glob("*.md")):
        if names := described(page.read_text()):
            text = table(names)
            write_part(page, "costs", text, COMMAND) if docs else print(f"{page.stem}\n\n{text}\n")


if __name__ == "__main__":
    main()
