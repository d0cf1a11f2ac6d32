"""Which share of FedAvg's bytes FedLAMA sends, and why: from what its runs recorded at the end of each window.

    python benchmarks/fedlama_share.py RUN... --md docs/fedlama-share.md    # FedLAMA with rules = "public"

With these rules a run records the discrepancy d of every weight. From d this prints, for each quarter of the run,
the share of the parameters that wait in the next window by either rule: `public` (only kernels wait, as in the authors'
program) and `paper` (modules wait, as printed), and the cost of each as the paper counts it,

    cost = 1 - (share that waits) (1 - 1 / phi)

and once for the whole run: the cost of the parameters, with the first windows, in which nothing waits, and without; and
that of all bytes, which have running statistics of batch norm and headers, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.spec import Spec, layer_of
from thinwire.experiments.config import from_table
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.toml import read_toml
from thinwire.models import build
from thinwire.schedules.lama import FedLAMA, Layer

HEAD = """# The share of FedAvg's bytes that FedLAMA sends

Runs of `thinwire repro fedlama-4-program` (CIFAR-10, ResNet-20, Dirichlet 0.5, 32 of 128 clients), which record the
discrepancy of every weight. Each row is a quarter of a run: the cost of the intervals to which its discrepancies
lead, by the rule of the authors' program (only kernels wait) and by the printed one (modules wait). Cost is the share
of the parameters that a client uploads, as the paper counts; the paper's is 42.4 % for this column of its Table 4.

""".splitlines()
BEGIN = "<!-- begin share: python benchmarks/fedlama_share.py RUN... --md docs/fedlama-share.md -->"


class Window(NamedTuple):
    """What the end of a window measured."""

    round: int
    public: float  # share of the parameters that wait, by the authors' rule
    paper: float  # the same by the printed rule
    others: float  # share of the discrepancy that is not of kernels


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The recorded rounds of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def share(schedule: FedLAMA, layers: dict[str, Layer], discrepancy: dict[str, float], total: int) -> float:
    """The share of the parameters that wait after these discrepancies, of whole layers."""
    order = list(layers)
    taken = schedule._taken([layers[name] for name in order], [discrepancy[name] for name in order])
    return sum(layers[order[i]].size for i in taken) / total


def windows(rows: list[dict[str, Any]], spec: Spec, phi: int) -> list[Window]:
    """The windows of a run that measured something."""
    rules = {name: FedLAMA(phi, rules=name) for name in ("public", "paper")}
    layers = {name: rule._layers(spec) for name, rule in rules.items()}
    total = sum(block.numel for block in spec)
    out = []
    for row in rows:
        if not row.get("layers"):
            continue
        single = {name: one["discrepancy"] * layers["public"][name].size for name, one in row["layers"].items()}
        modules = dict.fromkeys(layers["paper"], 0.0)
        for name, value in single.items():
            modules[layer_of(name)] += value
        shares = (
            share(rules["public"], layers["public"], single, total),
            share(rules["paper"], layers["paper"], modules, total),
        )
        others = sum(value for name, value in single.items() if not layers["public"][name].candidate)
        out.append(Window(row["round"], *shares, others / sum(single.values())))
    return out


def mean(values: list[float]) -> float:
    """The mean; not a number without values."""
    return sum(values) / len(values) if values else float("nan")


def report(run: Path) -> list[str]:
    """The lines of one run."""
    experiment: Experiment = from_table(read_toml(run / "config.toml"))
    schedule = experiment.method.schedule
    if not isinstance(schedule, FedLAMA) or schedule.rules != "public":
        raise SystemExit(f"{run}: expected a run of FedLAMA with rules = 'public', whose records have every weight")
    model = build(experiment.task.model.kind, **dict(experiment.task.model.options))
    spec = Spec.of({name: block.detach() for name, block in model.named_parameters()})
    rows = rows_of(run)
    found, last = windows(rows, spec, schedule.phi), rows[-1]["round"]
    saved = 1 - 1 / schedule.phi
    lines = [f"### {run.name}: {last} rounds, lr {experiment.method.client_opt.lr:g}", ""]
    lines += [
        "| rounds | cost, public, % | cost, paper's rule, % | discrepancy not of kernels, % | windows |",
        "|---|---|---|---|---|",
    ]
    for quarter in range(4):
        begin, end = quarter * last / 4, (quarter + 1) * last / 4
        part = [one for one in found if begin < one.round <= end]
        costs = [100 * (1 - saved * mean([getattr(one, rule) for one in part])) for rule in ("public", "paper")]
        others = 100 * mean([one.others for one in part])
        lines.append(f"| {begin:.0f} to {end:.0f} | {costs[0]:.1f} | {costs[1]:.1f} | {others:.1f} | {len(part)} |")
    waits = {one.round + step: one.public for one in found for step in range(1, schedule.phi + 1)}
    parameters = 100 * mean([1 - saved * waits.get(row["round"], 0.0) for row in rows])
    statistics = sum(block.numel() for block in model.buffers() if block.dim())
    whole = 4 * (sum(block.numel for block in spec) + statistics)
    sent = 100 * sum(row["bytes_up"] for row in rows) / (whole * sum(row["clients"] for row in rows))
    clean = 100 * mean([1 - saved * value for value in waits.values()])
    lines += [
        "",
        "| cost of the parameters, % | without the first windows | of all bytes up |",
        "|---|---|---|",
        f"| {parameters:.2f} | {clean:.2f} | {sent:.2f} |",
        "",
    ]
    return lines


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--md", type=Path, help="write a page instead of printing")
    options = parser.parse_args()
    lines = [line for run in options.runs for line in report(run)]
    if options.md:
        options.md.write_text("\n".join([*HEAD, BEGIN, *lines[:-1], "<!-- end share -->"]) + "\n")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
