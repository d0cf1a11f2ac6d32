"""The page of claims: for each paper what it claims, what our runs say, and which presets have run.

The tables with all values are in `papers/archive/tables.md`; `python -m papers published` writes both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from papers.archive import Archive, Runs
from papers.grid import summary, training_failed
from papers.markdown import markdown
from papers.tables import load, names, papers
from papers.verdicts import TableRows, verdict
from thinwire.federation.settings import Settings
from thinwire.optimizers import Jacobian
from thinwire.runs.config import digest

_IMAGES = 50_000  # examples of a dataset, about: for the estimate of what is left
_COMMAND = "`python -m papers repro {} --scale gpu --device cuda`"


def overview(tables: Mapping[str, TableRows], archive: Archive) -> str:
    """The page, from the rows of the tables and the runs of their archive."""
    text = (
        "# Claims of the papers\n\nVerdicts are of the rows with the paper's recipe, by paired 95 % intervals over "
        "seeds: `holds`, `level` (the interval includes the bound), `fails`, `not run`. An accuracy is the `best` or "
        "the `final` one of a run, or the final one of the `client`s. Tables, charts and searches are in "
        "`papers/archive/tables.md`, runs in `papers/archive/tables.json`; a command with the option `--md "
        "papers/archive/tables.md` adds to both and repeats only runs that are older than a fix. This page is written "
        "by `python -m papers published`.\n\n"
    )
    for paper in papers():
        rows = []
        for claim in paper["claims"]:
            as_printed, ours = (verdict(claim.get(key, ""), tables) for key in ("recipe", "ours"))
            own = ours.text if ours.text == "-" else f"{ours.word}: {ours.text}"
            seeds = as_printed.seeds if as_printed.seeds != "-" else ours.seeds
            command = _COMMAND.format(claim["recipe"].partition(";")[0])
            rows.append([claim["claim"], claim["number"], as_printed.text, own, seeds, as_printed.word, command])
        heads = ["claim", "the paper", "ours, the paper's recipe", "ours, our recipe", "seeds", "verdict", "command"]
        text += f"## {paper['title']}\n\n{markdown(heads, rows, plain=False)}\n{' '.join(paper['prose'].split())}\n\n"
    return text + _presets(archive)


def _presets(archive: Archive) -> str:
    """Which presets have run at scale `gpu`, and what the others cost."""
    runs, tables = Runs(Path("no run directories"), archive), [load(name, "gpu", "cuda") for name in names()]
    needed = {
        one.name: {digest(e): e for line in (*one.grid.trials(runs), *one.grid.final(runs)) for e in line.runs}
        for one in tables
    }
    known: dict[str, list[float]] = defaultdict(list)  # seconds of an example
    for e in (e for found in needed.values() for e in found.values()):
        if seconds := (archive.find(e) or {}).get("seconds"):
            known[_kind(e)].append(seconds / _work(e))
    rows = []
    for one in tables:
        found = needed[one.name].values()
        left = [e for e in found if not summary(e, runs) and not training_failed(e, runs)]
        costs = [_work(e) * statistics.median(known[_kind(e)]) / 3600 for e in left if _kind(e) in known]
        hours = f"{sum(costs):.1f}" + (f" and {more} runs" if (more := len(left) - len(costs)) else "")
        state = (
            "counted"
            if not found
            else "has run"
            if not left
            else "has not run"
            if len(left) == len(found)
            else "in part"
        )
        runs_left = f"{len(left)} of {len(found)}" if found else "-"
        rows.append(
            [one.name, one.content["paper"], state, runs_left, hours if left else "-", _COMMAND.format(one.name)]
        )
    heads = ["preset", "table", "state", "runs left", "GPU hours left, about", "command"]
    return (
        "## Presets\n\nAt scale `gpu`. Hours are the sum over runs, by the seconds of archived runs of the same task "
        "and model; several runs share a device, and the real time is a fraction.\n\n"
        + markdown(heads, rows, plain=False)
    )


def _kind(e: Settings) -> str:
    """What decides the seconds of an example."""
    return f"{e.task.kind} {e.task.model}"


def _work(e: Settings) -> float:
    """Examples that a run trains on, about; a step with the Jacobian penalty counts three times."""
    of_client = e.local.steps * e.local.batch or e.local.epochs * _IMAGES / (e.task.clients or 100)
    return e.rounds * (e.cohort.size or 10) * of_client * (3 if isinstance(e.method.penalty, Jacobian) else 1)
