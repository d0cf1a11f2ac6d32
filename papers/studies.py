"""Studies of single methods, each for a part of the documentation: SparseLoCo, FedLAMA and FLASC.

    python -m papers sparseloco --docs docs                                bits of a value, for its page
    python -m papers sparseloco --search --docs docs                       settings on digits, by held-out examples
    python -m papers sparseloco --against --docs docs                      its settings against FedAvg, on other seeds
    python -m papers fedlama-share RUN... --md docs/fedlama-share.md       FedLAMA with rules = "public"
    python -m papers flasc-s --device cuda --jobs 8                        docs/results/flasc-s.md and .json

SparseLoCo: clients train as in `thinwire run sparseloco --on TASK`, two in a round for four steps of 16 examples; the
messages are those of the last of a few rounds, when error feedback has earlier errors. Bits count whole messages, with
headers, scales and checksums. The paper's coding has a fixed length: log2(4,096) = 12 bits for a position, 2 for a
value.

FedLAMA: which share of FedAvg's bytes it sends, and why, from the discrepancy d of every weight that a run with these
rules records at the end of each window. Cost is as the paper counts it, for each quarter of the run, by the rules
`public` (only kernels wait, as in the authors' program) and `paper` (modules wait, as printed):

    cost = 1 - (share of the parameters that waits) (1 - 1 / phi)

FLASC: rank and density on 20 Newsgroups, every pair run once, and what the search FLASC-S of the paper finds among
these runs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import thinwire as tw
from papers.grid import Grid, metrics, summary
from papers.markdown import markdown, mean_std_text, widened
from thinwire.core.names import layer_of
from thinwire.core.selection import kept
from thinwire.core.text import human_bytes
from thinwire.core.tree import Spec
from thinwire.federation.simulation import make_simulation
from thinwire.models import build
from thinwire.runs.build import build_job
from thinwire.runs.config import digest, from_table, resolve
from thinwire.runs.toml import read_toml
from thinwire.schedules.lama import FedLAMA, Layer

# -- SparseLoCo --------------------------------------------------------------------------------------------------------

SEARCHED: dict[str, list[float]] = {"lr": [0.003, 0.01, 0.02], "server_lr": [1, 2, 4, 8], "decay": [0.95]}
SEARCH_SEED, SEEDS = 100, 3  # results count from seed 0
BITS = (
    "| task | weights | values in a message | bytes of a message | bits a value | paper's coding, bits a value | "
    "of a message of float32 |\n|---|---|---|---|---|---|---|"
)
TASKS = {"digits": 3, "fashion-mnist": 2, "shakespeare": 2}  # task -> rounds


def bits(tasks: Sequence[str] = tuple(TASKS)) -> str:
    """The table of bits that SparseLoCo takes for a value."""
    return "\n".join([BITS, *(_bits_line(task, TASKS[task]) for task in tasks)])


def _bits_line(task: str, rounds: int) -> str:
    few = {"engine.backend": "loop", "cohort.size": 2, "local.batch": 16, "local.steps": 4}
    few |= {"rounds": rounds + 1, "eval.every": rounds + 1}  # so that nothing is evaluated
    experiment = resolve("sparseloco", task, few)
    simulation = make_simulation(experiment.engine, build_job(experiment))
    size, codec = simulation.contract.code.size, experiment.method.up.inner  # type: ignore[attr-defined]
    sizes = [min(codec.chunk, size - start) for start in range(0, size, codec.chunk)]
    values = sum(kept(codec.density, one, codec.rounding) for one in sizes)
    state = simulation.start()
    for _ in range(rounds):
        state, record = simulation.round(state)
    length = record.bytes_up / record.clients
    fixed = math.log2(codec.chunk) + 2
    return (
        f"| {task} | {size:,} | {values:,} | {length:,.0f} | {8 * length / values:.2f} | {fixed:.0f} | "
        f"1/{4 * size / length:,.0f} |"
    )


def searched(out: Path) -> str:
    """The table of the search on digits: the best by held-out examples first."""
    found = tw.sweep("sparseloco", SEARCHED, "digits", seeds=1, seed=SEARCH_SEED, validation_fraction=0.1, out=out)
    lines = ["| `lr` | `server_lr` | `beta` | held-out accuracy, % | test accuracy, % |", "|---|---|---|---|---|"]
    for row in found.rows:
        assert row.validation
        assert row.final
        values = " | ".join(f"{value:g}" for value in row.values.values())
        lines.append(f"| {values} | {100 * row.validation.mean:.2f} | {100 * row.final.mean:.2f} |")
    return "\n".join(lines)


def against(out: Path) -> str:
    """The table of results on digits, over seeds that the search did not use."""
    now = resolve("sparseloco", "digits").method
    own = (now.client_opt.lr, now.server_opt.lr)  # type: ignore[attr-defined]
    rate = resolve("fedavg", "digits").method.client_opt.lr  # type: ignore[attr-defined]
    cases: list[tuple[str, str, dict[str, list[float]]]] = [
        ("FedAvg", "fedavg", {"lr": [rate]}),
        ("SparseLoCo, `lr` 0.001, `server_lr` 1", "sparseloco", {"lr": [0.001], "server_lr": [1]}),
        (f"SparseLoCo, `lr` {own[0]:g}, `server_lr` {own[1]:g}", "sparseloco", {"lr": [own[0]], "server_lr": [own[1]]}),
    ]
    lines = [f"| | test accuracy, %, {SEEDS} seeds | bytes |", "|---|---|---|"]
    for label, method, over in cases:
        row = tw.sweep(method, over, "digits", seeds=SEEDS, out=out).rows[0]
        assert row.final
        lines.append(f"| {label} | {100 * row.final.mean:.2f} ± {100 * row.final.std:.2f} | {human_bytes(row.bytes)} |")
    return "\n".join(lines)


# -- FedLAMA -----------------------------------------------------------------------------------------------------------

SHARE_PAGE = """# The share of FedAvg's bytes that FedLAMA sends

Runs of `python -m papers repro fedlama-4-program` (CIFAR-10, ResNet-20, Dirichlet 0.5, 32 of 128 clients), which record
the discrepancy of every weight. Each row is a quarter of a run: the cost of the intervals to which its discrepancies
lead, by the rule of the authors' program (only kernels wait) and by the printed one (modules wait). Cost is the share
of the parameters that a client uploads, as the paper counts; the paper's is 42.4 % for this column of its Table 4.

"""


class Window(NamedTuple):
    """What the end of a window measured."""

    round: int
    public: float  # share of the parameters that wait, by the authors' rule
    paper: float  # the same by the printed rule
    others: float  # share of the discrepancy that is not of kernels


def _share(schedule: FedLAMA, layers: Mapping[str, Layer], discrepancy: Mapping[str, float], total: int) -> float:
    """The share of the parameters that wait after these discrepancies, of whole layers."""
    order = list(layers)
    taken = schedule._taken([layers[name] for name in order], [discrepancy[name] for name in order])
    return sum(layers[order[i]].size for i in taken) / total


def windows(rows: Sequence[Mapping[str, Any]], spec: Spec, phi: int) -> list[Window]:
    """The windows of a run that measured something."""
    public, paper = FedLAMA(phi, rules="public"), FedLAMA(phi, rules="paper")
    kernels, of_modules = public._layers(spec), paper._layers(spec)
    total = sum(block.numel for block in spec)
    out = []
    for row in rows:
        if not row.get("layers"):
            continue
        single = {name: one["discrepancy"] * kernels[name].size for name, one in row["layers"].items()}
        modules = dict.fromkeys(of_modules, 0.0)
        for name, value in single.items():
            modules[layer_of(name)] += value
        shares = _share(public, kernels, single, total), _share(paper, of_modules, modules, total)
        others = sum(value for name, value in single.items() if not kernels[name].candidate)
        out.append(Window(row["round"], *shares, others / sum(single.values())))
    return out


def _mean(values: Sequence[float]) -> float:
    """The mean; not a number without values."""
    return sum(values) / len(values) if values else math.nan


def share_text(run: Path) -> str:
    """The tables of one run of FedLAMA.

    The second has the cost over the whole run, with the first windows, in which nothing waits, and without; and that of
    all bytes, which have running statistics of batch norm and headers, too.
    """
    experiment = from_table(read_toml(run / "config.toml"))
    schedule = experiment.method.schedule
    if not isinstance(schedule, FedLAMA) or schedule.rules != "public":
        raise tw.ConfigError(f"{run}: expected a run of FedLAMA with rules = 'public', whose records have every weight")
    assert experiment.task.model
    model = build(experiment.task.model.kind, **dict(experiment.task.model.options))
    spec = Spec.of({name: block.detach() for name, block in model.named_parameters()})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found, last = windows(rows, spec, schedule.phi), rows[-1]["round"]
    saved = 1 - 1 / schedule.phi
    quarters = []
    for quarter in range(4):
        begin, end = quarter * last / 4, (quarter + 1) * last / 4
        part = [one for one in found if begin < one.round <= end]
        costs = [100 * (1 - saved * _mean([getattr(one, rule) for one in part])) for rule in ("public", "paper")]
        others = 100 * _mean([one.others for one in part])
        quarters.append([f"{begin:.0f} to {end:.0f}", *(f"{one:.1f}" for one in (*costs, others)), str(len(part))])
    waits = {one.round + step: one.public for one in found for step in range(1, schedule.phi + 1)}
    parameters = _mean([1 - saved * waits.get(row["round"], 0.0) for row in rows])
    clean = _mean([1 - saved * value for value in waits.values()])
    statistics = sum(block.numel() for block in model.buffers() if block.dim())
    whole = 4 * (sum(block.numel for block in spec) + statistics)
    sent = sum(row["bytes_up"] for row in rows) / (whole * sum(row["clients"] for row in rows))
    heads = ["rounds", "cost, public, %", "cost, paper's rule, %", "discrepancy not of kernels, %", "windows"]
    total = ["cost of the parameters, %", "without the first windows", "of all bytes up"]
    rate = experiment.method.client_opt.lr  # type: ignore[attr-defined]
    return (
        f"### {run.name}: {last} rounds, lr {rate:g}\n\n{markdown(heads, quarters)}\n"
        f"{markdown(total, [[f'{100 * one:.2f}' for one in (parameters, clean, sent)]])}"
    )


def share_page(runs: Sequence[Path]) -> str:
    """The page on FedLAMA's share."""
    command = "python -m papers fedlama-share RUN... --md docs/fedlama-share.md"
    tables = "\n".join(map(share_text, runs))
    return f"{SHARE_PAGE}<!-- begin share: {command} -->\n{tables}<!-- end share -->\n"


# -- FLASC-S -----------------------------------------------------------------------------------------------------------

RANKS, DENSITIES = (1, 4, 16, 64), (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
CHOSEN_BY = "final_client_accuracy"  # of the tenth of each client's examples that it does not train on
KEPT = (
    *("rounds", "best_accuracy", "final_accuracy", CHOSEN_BY),
    *("task", "status", "status_round", "chance_accuracy"),
)
ALPHAS = (0.01, 1.0)
Pair = tuple[int, float]


def flasc_grid(alpha: float, rounds: int = 40, seeds: int = 3, device: str = "cpu") -> Grid:
    """FLASC on 20 Newsgroups with every rank and density; alpha / rank of the adapter stays 1."""
    settings: dict[str, Any] = {
        "task.clients": 350,
        "task.partition": {"kind": "dirichlet-flasc", "alpha": alpha},
        "task.validation_fraction": 0.1,
        "task.length": 64,
        "cohort.size": 10,
        "local.epochs": 1,
        "local.batch": 16,
        "eval.every": rounds,
        "checkpoint.every": rounds,
        "engine.precision": "bf16" if device == "cuda" else "float32",
        "method.download": "full",
        "method.client_weight": "uniform",
        "method.client_opt": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
        "method.server_opt": {"kind": "adam", "lr": 0.01},
    }
    rows = [
        {
            "method": "flasc",
            "label": f"rank {rank}, density {density:g}",
            "set": {
                "method.space.rank": rank,
                "method.space.alpha": float(rank),
                "method.up.density": density,
                "method.down.density": density,
            },
        }
        for rank in RANKS
        for density in DENSITIES
    ]
    task = {"on": "text-classification", "recipe": "paper", "rounds": rounds, "seeds": seeds}
    return Grid({**task, "set": settings, "rows": rows}, device)


def flasc_s(runs: Mapping[Pair, Mapping[str, Any]]) -> list[Pair]:
    """The pairs of rank and density that the search of the paper runs, the best by validation examples first.

    stage 1   for d in densities:  stop when (r2, d) beats (r1, min(1, d r2 / r1))
    stage 2   (r, d) for all other ranks r
    """
    small, large = RANKS[:2]
    tried: list[Pair] = []
    for density in DENSITIES:
        low, high = (small, min(1.0, density * large / small)), (large, density)
        tried += [low, high]
        if runs[high][CHOSEN_BY] > runs[low][CHOSEN_BY]:
            break
    tried += [(rank, density) for rank in RANKS[1:]]
    return sorted(dict.fromkeys(tried), key=lambda pair: (-runs[pair][CHOSEN_BY], runs[pair]["bytes_total_honest"]))


def flasc_part(alpha: float, grid: Grid, out: Path) -> tuple[str, dict[str, Any]]:
    """The section of one partition, and the values of its runs; every seed has a search of its own."""
    pairs = [(rank, density) for rank in RANKS for density in DENSITIES]
    lines = dict(zip(pairs, grid.lines(), strict=True))
    done = {pair: [one for e in line.runs if (one := summary(e, out))] for pair, line in lines.items()}
    seeds = [e.seed for e in lines[pairs[0]].runs]
    if (count := sum(map(len, done.values()))) < len(pairs) * len(seeds):
        return f"## alpha {alpha:g}\n\n{count} of {len(pairs) * len(seeds)} runs finished.\n", {}
    searches = [flasc_s({pair: found[i] for pair, found in done.items()}) for i in range(len(seeds))]
    values: dict[str, Any] = {}
    rows = []
    for pair, found in done.items():
        label, runs = f"rank {pair[0]}, density {pair[1]:g}", lines[pair].runs
        names = [digest(e)[:6] for e in runs]
        chosen = " ".join(str(seed) for seed, tried in zip(seeds, searches, strict=True) if tried[0] == pair)
        total = human_bytes(statistics.fmean(one["bytes_total_honest"] for one in found))
        rows.append([label, mean_std_text([one["final_accuracy"] for one in found]), total, chosen, " ".join(names)])
        for name, e, value in zip(names, runs, found, strict=True):
            about = {"method": label, "alpha": alpha, "seed": e.seed, "bytes_total": value["bytes_total_honest"]}
            curve = [[m["round"], m["accuracy"]] for m in metrics(e, out) if m["accuracy"] is not None]
            values[name] = about | {key: value.get(key) for key in KEPT} | {"accuracy": curve}
    heads = ["method", "final accuracy %", "total", "chosen on seed", "runs"]
    text = f"## alpha {alpha:g}\n\n" + markdown(*widened(heads, rows, list(done.values())))
    gaps, shares = [], []
    for i, tried in enumerate(searches):
        gaps.append(max(found[i]["final_accuracy"] for found in done.values()) - done[tried[0]][i]["final_accuracy"])
        spent, whole = (sum(done[pair][i]["bytes_total_honest"] for pair in some) for some in (tried, pairs))
        shares.append(spent / whole)
    text += (
        f"\nOn the test set the pair that the search chose is {mean_std_text(gaps)} points below the best pair of the "
        f"grid. The search sent {mean_std_text(shares)} % of the bytes of the grid.\n"
    )
    return text, values


def flasc_page(out: Path, rounds: int, seeds: int, device: str) -> tuple[str, dict[str, Any]]:
    """The page on FLASC-S, and the values of its runs."""
    parts = [flasc_part(alpha, flasc_grid(alpha, rounds, seeds, device), out) for alpha in ALPHAS]
    head = (
        "# FLASC-S against a grid\n\nRank and density of FLASC (both directions) on 20 Newsgroups with MiniLM, "
        "350 clients by the paper's Dirichlet partition, 10 per round, one epoch of batch 16, "
        f"{rounds} rounds, texts truncated at 64 tokens; alpha / rank and all learning rates as for rank 16; "
        f"{seeds} seeds; device {device}. The search chooses by a tenth of each client's examples.\n\n"
    )
    command = f"python -m papers flasc-s --device {device} --rounds {rounds} --seeds {seeds}"
    text = head + "\n".join(text for text, _ in parts) + f"\nWritten by `{command}`.\n"
    return text, {name: one for _, values in parts for name, one in sorted(values.items())}
