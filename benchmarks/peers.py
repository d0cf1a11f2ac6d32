"""How long a round takes on a CPU, ours and that of others, on the same work in the same run.

    python -m venv peers                                      others are installed apart from thinwire, if at all
    peers/bin/pip install torch==2.13.0 'flwr[simulation]==1.41.0' jax==0.10.2 msgpack immutabledict dm-haiku optax
    peers/bin/pip install --no-deps pfl==0.6.0 fedjax==0.0.17
    peers/bin/pip install 'dp-accounting<0.6' 'multiprocess<0.71' prv-accountant

    python benchmarks/peers.py --python peers/bin/python --docs docs

Contestants are processes of their own (`contestants.py`). They take turns, a round each, so that whatever else the
machine does hits all alike; the first turn is not counted, the median of the others is. All are given the same initial
weights, the same clients in every round and the same examples in the same order. After the first round each must have
the averaged weights of the plain loop ("off" is the length of the difference, as a share of that of their change), and
in every round as many steps. torch's rivals run with oneDNN and without ("-off"): they are compared by their best.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import CLIENTS, SHAPES, job_of
from benchmarks.page import write_part

COHORT, BATCH, LR = 10, 32, 0.01
EXAMPLES = {"cnn2": 600, "cnn-cifar": 500}
ROUNDS = {"cnn2": 7, "cnn-cifar": 2}
FAR = 0.03  # a step left out would be 0.05 or more; rounding alone moves the plain loop by 0.018 (CIFAR, no oneDNN)
NAMES = ("loop", "loop-off", "loop-channels-last", "pfl", "pfl-off", "flower", "flower-off", "fedjax", "ours")
LONG = ("loop", "loop-off", "pfl-off", "flower-off", "fedjax", "ours")  # where a round takes minutes
# by model: the rival, and by how much ours must be faster than the best of its forms
BARS = {"cnn2": {"loop": 1 / 0.55, "pfl": 1.4, "flower": 1.15}, "cnn-cifar": {"loop": 1 / 0.68}}


def lay_out(model: str, examples: int, rounds: int, folder: Path) -> int:
    """Write what all contestants have in common; the steps of a round."""
    from thinwire.simulation.engine import LocalEngine

    channels, size, *_ = SHAPES[model]
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.standard_normal((CLIENTS * examples, channels, size, size), dtype=np.float32))
    np.save(folder / "y.npy", rng.integers(0, 10, CLIENTS * examples))
    (folder / "work.json").write_text(json.dumps({"model": model, "lr": LR, "batch": BATCH}))
    job = job_of(model, LR, BATCH, COHORT, folder)
    simulation = LocalEngine("cpu", "loop").prepare(job)
    np.savez(
        folder / "first.npz", **{name: block.numpy() for name, block in simulation.federation.model.weights().items()}
    )
    cohorts = [tuple(simulation.federation.key.fold("cohort", r).choice(CLIENTS, COHORT)) for r in range(rounds)]
    orders = []
    for number, cohort in enumerate(cohorts):
        work = simulation.federation.sampler.workload(number, cohort)
        if (work.rows[:, :-1] != BATCH).any():
            raise SystemExit("batches must be full but for the last")
        orders.append(work.index.numpy().reshape(COHORT, -1)[:, :examples])
    np.save(folder / "cohorts.npy", np.array(cohorts))
    np.save(folder / "orders.npy", np.array(orders))
    return sum(work.steps)


class Contestant:
    """A process that plays one side."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        command = [python, str(Path(__file__).with_name("contestants.py")), name, str(folder)]
        pipe: Any = subprocess.PIPE
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.steps: set[int] = set()
        self.note = ""
        self.trouble = self.hear("ready")[1]

    def hear(self, key: str) -> tuple[dict[str, Any], str]:
        """The next answer, or why there is none."""
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        answer = json.loads(line) if line else {}
        if key in answer:
            return answer, ""
        words = self.log.read_text().strip().splitlines()
        why = answer.get("missing") or (words[-1] if words else f"ended with {self.process.wait()}")
        return {}, f"not measured: {why[:160]}"

    def play(self) -> None:
        """One round."""
        if self.trouble:
            return
        self.process.stdin.write("go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        answer, self.trouble = self.hear("seconds")
        if not self.trouble:
            self.seconds.append(answer["seconds"])
            self.cpu.append(answer["cpu"])
            self.steps.add(answer["steps"])
            self.note = answer["note"]

    def rest(self) -> None:
        """Until it is ready for the next round."""
        if not self.trouble:
            self.trouble = self.hear("ready")[1]

    def end(self) -> None:
        """Let it go; one that has nothing more to read ends by itself."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]


def compare(model: str, names: list[str], python: str, rounds: int, examples: int) -> dict[str, Any]:
    """All contestants on one model."""
    with tempfile.TemporaryDirectory(prefix="thinwire-peers-") as place:
        folder = Path(place)
        steps = lay_out(model, examples, rounds + 1, folder)
        load = os.getloadavg()[0]
        players = []
        try:
            for name in names:
                players.append(Contestant(name, sys.executable if name == "ours" else python, folder))
                if players[-1].trouble:
                    print(f"{model}  {name}: {players[-1].trouble}", flush=True)
            for number in range(rounds + 1):
                for player in players:
                    player.play()
                    if number < rounds:
                        player.rest()
        finally:
            for player in players:
                player.end()
        rows = [row_of(player, steps, folder) for player in players]
    measured = {row["name"]: row for row in rows if "seconds" in row}
    for row in measured.values():
        row["ratio"] = row["seconds"] / measured["loop"]["seconds"] if "loop" in measured else math.nan
        row["faster"] = row["seconds"] / measured["ours"]["seconds"] if "ours" in measured else math.nan
    for row in rows:
        print(model, "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    facts = {"model": model, "examples": examples, "rounds": rounds, "steps": steps, "rows": rows}
    return facts | {"load": [load, os.getloadavg()[0]], "bars": bars(model, measured)}


def row_of(player: Contestant, steps: int, folder: Path) -> dict[str, Any]:
    """What is known of one contestant."""
    if player.trouble or len(player.seconds) < 2:
        return {"name": player.name, "trouble": player.trouble or "not measured: it played one round only"}
    first = dict(np.load(folder / "first.npz"))
    got = dict(np.load(folder / f"after-{player.name}.npz"))
    row: dict[str, Any] = {"name": player.name, "seconds": statistics.median(player.seconds[1:])}
    row |= {"cpu": statistics.median(player.cpu[1:]), "steps": sorted(player.steps), "note": player.note}
    expected = folder / "after-loop.npz"
    row["off"] = math.nan
    if expected.exists():
        wanted = dict(np.load(expected))
        row["off"] = distance(got, wanted) / distance(wanted, first)
    same = player.steps == {steps} and not row["off"] > FAR
    return row | {"same": same}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The length of the difference."""
    return math.sqrt(sum(float(np.square(a[name].astype(np.float64) - b[name]).sum()) for name in b))


def bars(model: str, measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, against the plain loop as it is and the best form of each rival."""
    found = []
    for rival, least in BARS[model].items():
        forms = [row for name, row in measured.items() if name == rival or (name == f"{rival}-off" and rival != "loop")]
        if forms and "ours" in measured:
            best = min(forms, key=lambda row: row["seconds"])
            found.append({"rival": best["name"], "least": least, "times": best["faster"]})
    return found


def page(found: list[dict[str, Any]]) -> str:
    """Tables, and whether what must hold does."""
    text = [f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}."]
    for facts in found:
        load = " to ".join(f"{value:.1f}" for value in facts["load"])
        text += [
            "",
            f"**{facts['model']}**: {CLIENTS} clients, {COHORT} a round, {facts['examples']} examples, one epoch, "
            f"batch {BATCH}: {facts['steps']} steps a round. Medians of {facts['rounds']} rounds that took turns; "
            f"load of the machine {load}.",
            "",
            "| | seconds a round | of the plain loop | times that of ours | processor seconds | steps | off | |",
            "|" + "---|" * 8,
        ]
        for row in facts["rows"]:
            if "trouble" in row:
                text.append(f"| {row['name']} | {row['trouble']} | - | - | - | - | - | - |")
                continue
            cpu = f"{row['cpu']:.2f}" if row["cpu"] else "-"
            steps = ", ".join(map(str, row["steps"])) + ("" if row["same"] else " (NOT THE SAME WORK)")
            cells = [row["name"], f"{row['seconds']:.3f}", f"{row['ratio']:.2f}", f"{row['faster']:.2f}", cpu]
            text.append("| " + " | ".join([*cells, steps, f"{row['off']:.1e}", row["note"]]) + " |")
        if facts["bars"]:
            text += ["", "| ours against | times faster, at least | found | |", "|---|---|---|---|"]
        for bar in facts["bars"]:
            word = "holds" if bar["times"] >= bar["least"] else "DOES NOT HOLD"
            text.append(f"| {bar['rival']} | {bar['least']:.2f} | {bar['times']:.2f} | {word} |")
    return "\n".join(text)


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that has the others")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--only", nargs="*", choices=NAMES, help="these contestants")
    parser.add_argument("--rounds", type=int, help="rounds that are counted")
    parser.add_argument("--examples", type=int, help="examples of a client, to try it out")
    parser.add_argument("--docs", type=Path, help="write the tables into benchmarks.md in this folder")
    options = parser.parse_args()
    found = []
    for model in options.models:
        names = list(options.only or (NAMES if model == "cnn2" else LONG))
        rounds, examples = options.rounds or ROUNDS[model], options.examples or EXAMPLES[model]
        found.append(compare(model, names, options.python, rounds, examples))
    print(page(found))
    if options.docs:
        command = "python benchmarks/peers.py --python peers/bin/python --docs docs"
        write_part(options.docs / "benchmarks.md", "peers", page(found), command)


if __name__ == "__main__":
    main()
