"""Accuracy by attack, aggregation rule and method, over seeds; runs are ordinary run directories, and are used again.

    python benchmarks/faults/attacks.py digits --jobs 2 --docs docs
    python benchmarks/faults/attacks.py fashion-mnist --methods fedavg thin --device cuda --jobs 12 --budget 100

20 clients, all of them in every round, of which a fifth attack (`[attack]`, docs/attacks.md); two classes a client, or
labels by Dirichlet 0.1. Fashion-MNIST is reduced: few local steps and rounds. Rates are those of the default recipe;
nothing is searched.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from papers.grid import Grid, Line, metrics, summary, training_failed
from papers.markdown import markdown
from papers.runs import print_run, run_grids

CLIENTS, FRACTION, NEAR = 20, 0.2, 3.0  # NEAR: points that a rule may lose
ATTACKS: dict[str, Mapping[str, Any] | None] = {
    "none": None,
    "sign-flip": {"kind": "sign-flip", "factor": 10.0},
    "inner-product": {"kind": "inner-product", "factor": 10.0},
    "label-flip": {"kind": "label-flip"},
    "a-little": {"kind": "a-little", "z": 1.5},
}
RULES: dict[str, Mapping[str, Any]] = {  # of `method.aggregator`; the second sets `method.norm_bound`
    "weighted": {"kind": "weighted"},
    "weighted, norm_bound 1": {"kind": "weighted"},
    "trimmed, share 0.3": {"kind": "trimmed", "share": 0.3},
    "median": {"kind": "median"},
    "geometric-median": {"kind": "geometric-median"},
    "centered-clipping": {"kind": "centered-clipping"},
    "multi-krum, faulty 0.2": {"kind": "multi-krum", "faulty": 0.2},
    "nearest-mixing, faulty 0.2": {"kind": "nearest-mixing", "faulty": 0.2},
}
METHODS = ("fedavg", "mapo", "thin", "stc")
CLASSES, DIRICHLET = {"kind": "classes", "per_client": 2}, {"kind": "dirichlet", "alpha": 0.1}
_DIGITS = {"on": "digits", "rounds": 40, "eval.every": 20, "local.steps": 3, "local.batch": 24}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {**_DIGITS, "task.partition": CLASSES},
    "digits-dirichlet": {**_DIGITS, "task.partition": DIRICHLET},
    "fashion-mnist": {
        "on": "fashion-mnist",
        "rounds": 60,
        "eval.every": 30,
        "local.steps": 5,
        "task.partition": CLASSES,
    },
}


def grid_of(
    task: str,
    methods: Sequence[str],
    rules: Sequence[str],
    attacks: Sequence[str],
    seeds: list[int],
    device: str = "cpu",
) -> Grid:
    """All runs of a table."""
    common = {
        "task.clients": CLIENTS,
        "cohort.size": CLIENTS,
        "checkpoint.every": 1000,
        **{key: value for key, value in TASKS[task].items() if "." in key},
    }
    rows = []
    for method in methods:
        for rule in rules:
            for name in attacks:
                attack = {"attack": {**ATTACKS[name], "fraction": FRACTION}} if ATTACKS[name] else {}
                settings = {"method.aggregator": RULES[rule], **attack}
                settings |= {"method.norm_bound": 1.0} if "norm_bound" in rule else {}
                rows.append({"method": method, "label": f"{method}|{rule}|{name}", "set": settings})
    whole = {key: TASKS[task][key] for key in ("on", "rounds")}
    return Grid({**whole, "seeds": seeds, "set": common, "rows": rows}, device)


def value(line: Line, out: Path) -> list[float]:
    """The last accuracy of each run that is there; of one that diverged before an evaluation, nan."""
    there = [e for e in line.runs if summary(e, out) or training_failed(e, out)]
    known = [[record["accuracy"] for record in metrics(e, out) if record["accuracy"] is not None] for e in there]
    return [one[-1] if one else math.nan for one in known]


def table(found: Mapping[tuple[str, str, str], Sequence[float]], methods: Sequence[str]) -> str:
    """A Markdown table for each method: rules by attacks, mean accuracy in percent, and the range over seeds."""
    text = ""
    for method in methods:
        rules = list(dict.fromkeys(rule for one, rule, _ in found if one == method))
        attacks = list(dict.fromkeys(attack for one, _, attack in found if one == method))
        rows = [[rule, *(_cell(found[method, rule, attack]) for attack in attacks)] for rule in rules]
        text += f"**{method}**\n\n{markdown(['rule', *attacks], rows)}\n"
        text += f"{kept(found, method, rules)}\n\n"
    return text.rstrip() + "\n"


def _cell(values: Sequence[float]) -> str:
    if not values or any(map(math.isnan, values)):
        return "diverged" if values else "-"
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ({100 * min(values):.0f} to {100 * max(values):.0f})"


def kept(found: Mapping[tuple[str, str, str], Sequence[float]], method: str, rules: Sequence[str]) -> str:
    """Which rules stay near the weighted mean without attack, under sign flips, as a sentence."""
    plain = found.get((method, "weighted", "none"))
    flipped = {rule: values for rule in rules if (values := found.get((method, rule, "sign-flip")))}
    if not plain or not flipped:
        return ""
    least = statistics.fmean(plain) - NEAR / 100
    near = [rule for rule, values in flipped.items() if statistics.fmean(values) >= least]
    names = ", ".join(near) if near else "no rule"
    return f"With sign flips within {NEAR:g} points of the weighted mean without attack: {names}."


def main() -> None:
    """Run what is missing, print the tables, and with --docs write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, help="stop after so many seconds: seed by seed; the next call goes on")
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--no-run", action="store_true", help="run nothing; cells of missing runs are -")
    parser.add_argument("--docs", type=Path, help="the documentation folder; its attacks.md gets the tables")
    options = parser.parse_args()
    grid = grid_of(options.task, options.methods, options.rules, options.attacks, options.seeds, options.device)
    if not options.no_run:
        run_grids([grid], options.out, options.jobs, options.data_dir, print_run, options.budget)
    found: dict[tuple[str, str, str], list[float]] = {}
    for line in grid.lines():
        method, rule, attack = line.label.split("|")
        found[method, rule, attack] = value(line, options.out)
    text = table(found, options.methods)
    print(text)
    if options.docs:
        words = [options.task]
        for name, given, usual in (
            ("--methods", options.methods, list(METHODS)),
            ("--rules", options.rules, list(RULES)),
            ("--attacks", options.attacks, list(ATTACKS)),
            ("--seeds", list(map(str, options.seeds)), ["0", "1", "2"]),
        ):
            words += [name, *(f"'{one}'" if " " in one else one for one in given)] if given != usual else []
        words += ["--device", options.device] if options.device != "cpu" else []
        command = f"python benchmarks/faults/attacks.py {' '.join(words)} --docs docs"
        write_part(options.docs / "attacks.md", options.task, text, command)


if __name__ == "__main__":
    main()
