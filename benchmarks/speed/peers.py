"""Time of a round on a CPU, compared with other frameworks on the same work.

    python -m venv peers                                      other frameworks are installed separately
    peers/bin/pip install torch==2.13.0 'flwr[simulation]==1.41.0' jax==0.10.2 msgpack immutabledict dm-haiku optax
    peers/bin/pip install --no-deps pfl==0.6.0 fedjax==0.0.17
    peers/bin/pip install 'dp-accounting<0.6' 'multiprocess<0.71' prv-accountant

    python benchmarks/speed/peers.py --python peers/bin/python --docs docs

Each kind of machine and each model has its own section of the page. Each framework runs in a separate process
(`frameworks.py`). They run one round each in turn, so that other load of the machine affects all of them; the first
round is a warm-up, and the median of the others is reported. All have the same initial weights, the same clients in
every round and the same examples in the same order. After the first round each must have the averaged weights of the
plain loop ("difference" is the norm of the difference, relative to the norm of the change), and in every round the same
number of steps. Frameworks based on torch run with and without oneDNN ("-off"); the faster counts.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from benchmarks.speed.frameworks import CLIENTS, SHAPES, job_of, usable_cores

COHORT, BATCH, LR = 10, 32, 0.01
EXAMPLES = {"cnn2": 600, "cnn-cifar": 500}
ROUNDS = {"cnn2": 7, "cnn-cifar": 2}
MAX_DIFFERENCE = 0.03  # a missing step gives 0.05 or more; rounding alone gives 0.018 (CIFAR, loop without oneDNN)
NAMES = ("loop", "loop-off", "loop-channels-last", "pfl", "pfl-off", "flower", "flower-off", "fedjax", "ours")
LONG = ("loop", "loop-off", "loop-channels-last", "pfl-off", "flower-off", "fedjax", "ours")  # if rounds take minutes
# by kind of machine and model: the other framework, and the required speedup over its fastest variant
REQUIRED: dict[str, dict[str, dict[str, float]]] = {
    "aarch64": {"cnn2": {"loop": 1 / 0.37, "pfl": 1.4, "flower": 1.15}, "cnn-cifar": {"loop": 1 / 0.50}},
    "x86_64": {
        "cnn2": {"loop": 1 / 0.55, "loop-channels-last": 1.4, "pfl": 1.7, "flower": 1.6, "fedjax": 1.8},
        "cnn-cifar": {"loop": 1 / 0.85},
    },
}


def write_inputs(model: str, examples: int, rounds: int, folder: Path) -> int:
    """Write the common inputs of all frameworks; returns the steps of a round."""
    from thinwire.federation.engine import Engine
    from thinwire.federation.simulation import make_simulation

    channels, size, *_ = SHAPES[model]
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.standard_normal((CLIENTS * examples, channels, size, size), dtype=np.float32))
    np.save(folder / "y.npy", rng.integers(0, 10, CLIENTS * examples))
    (folder / "work.json").write_text(json.dumps({"model": model, "lr": LR, "batch": BATCH}))
    job = job_of(model, LR, BATCH, COHORT, folder)
    simulation = make_simulation(Engine("cpu", "loop"), job)
    np.savez(folder / "first.npz", **{name: block.numpy() for name, block in simulation.model.weights().items()})
    cohorts = [tuple(simulation.key.fold("cohort", r).choice(CLIENTS, COHORT)) for r in range(rounds)]
    orders = []
    for number, cohort in enumerate(cohorts):
        work = simulation.sampler.workload(number, cohort)
        if (work.rows[:, :-1] != BATCH).any():
            raise SystemExit("all batches except the last must be full")
        orders.append(work.index.numpy().reshape(COHORT, -1)[:, :examples])
    np.save(folder / "cohorts.npy", np.array(cohorts))
    np.save(folder / "orders.npy", np.array(orders))
    return sum(work.steps)


class FrameworkProcess:
    """The process of one framework."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        command = [python, str(Path(__file__).with_name("frameworks.py")), name, str(folder)]
        pipe: Any = subprocess.PIPE
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.steps: set[int] = set()
        self.note, self.peak = "", 0.0
        self.failure = self.receive("ready")[1]

    def receive(self, key: str) -> tuple[dict[str, Any], str]:
        """The next response, or the reason why there is none."""
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        response = json.loads(line) if line else {}
        if key in response:
            return response, ""
        words = self.log.read_text().strip().splitlines()
        why = response.get("missing") or (words[-1] if words else f"ended with {self.process.wait()}")
        return {}, f"not measured: {why[:160]}"

    def run_round(self) -> None:
        """Run one round."""
        if self.failure:
            return
        self.process.stdin.write("go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        response, self.failure = self.receive("seconds")
        if not self.failure:
            self.seconds.append(response["seconds"])
            self.cpu.append(response["cpu"])
            self.steps.add(response["steps"])
            self.note, self.peak = response["note"], response["peak_mb"]

    def wait_ready(self) -> None:
        """Wait until it is ready for the next round."""
        if not self.failure:
            self.failure = self.receive("ready")[1]

    def close(self) -> None:
        """Close its input, at which it exits, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]


def compare(model: str, names: list[str], python: str, rounds: int, examples: int) -> dict[str, Any]:
    """Run all frameworks on one model."""
    with tempfile.TemporaryDirectory(prefix="thinwire-peers-") as place:
        folder = Path(place)
        steps = write_inputs(model, examples, rounds + 1, folder)
        load = os.getloadavg()[0]
        processes = []
        try:
            for name in names:
                processes.append(FrameworkProcess(name, sys.executable if name == "ours" else python, folder))
                if processes[-1].failure:
                    print(f"{model}  {name}: {processes[-1].failure}", flush=True)
            for number in range(rounds + 1):
                for process in processes:
                    process.run_round()
                    if number < rounds:
                        process.wait_ready()
        finally:
            for process in processes:
                process.close()
        rows = [row_of(process, steps, folder) for process in processes]
    measured = {row["name"]: row for row in rows if "seconds" in row}
    for row in measured.values():
        row["ratio"] = row["seconds"] / measured["loop"]["seconds"] if "loop" in measured else math.nan
        row["faster"] = row["seconds"] / measured["ours"]["seconds"] if "ours" in measured else math.nan
    for row in rows:
        print(model, "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    facts = {"model": model, "examples": examples, "rounds": rounds, "steps": steps, "rows": rows}
    return facts | {"load": [load, os.getloadavg()[0]], "checks": checks(model, measured)}


def row_of(process: FrameworkProcess, steps: int, folder: Path) -> dict[str, Any]:
    """The results of one framework."""
    if process.failure or len(process.seconds) < 2:
        return {"name": process.name, "failure": process.failure or "not measured: it ran one round only"}
    first = dict(np.load(folder / "first.npz"))
    got = dict(np.load(folder / f"after-{process.name}.npz"))
    row: dict[str, Any] = {"name": process.name, "seconds": statistics.median(process.seconds[1:])}
    row |= {
        "cpu": statistics.median(process.cpu[1:]),
        "peak_mb": process.peak,
        "steps": sorted(process.steps),
        "note": process.note,
    }
    expected = folder / "after-loop.npz"
    row["difference"] = math.nan
    if expected.exists():
        wanted = dict(np.load(expected))
        row["difference"] = distance(got, wanted) / distance(wanted, first)
    same = process.steps == {steps} and not row["difference"] > MAX_DIFFERENCE
    return row | {"same": same}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The norm of the difference."""
    return math.sqrt(sum(float(np.square(a[name].astype(np.float64) - b[name]).sum()) for name in b))


def checks(model: str, measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The required and measured speedups over the plain loop and the fastest variant of each framework."""
    found = []
    for other, least in REQUIRED.get(platform.machine(), {}).get(model, {}).items():
        forms = [row for name, row in measured.items() if name == other or (name == f"{other}-off" and other != "loop")]
        if forms and "ours" in measured:
            best = min(forms, key=lambda row: row["seconds"])
            found.append({"other": best["name"], "least": least, "times": best["faster"]})
    return found


def page(found: list[dict[str, Any]]) -> str:
    """Tables of times and checks."""
    text = [f"{platform.machine()}, {usable_cores()} cores, Python {platform.python_version()}."]
    for facts in found:
        load = " to ".join(f"{value:.1f}" for value in facts["load"])
        text += [
            "",
            f"**{facts['model']}**: {CLIENTS} clients, {COHORT} per round, {facts['examples']} examples, one epoch, "
            f"batch {BATCH}: {facts['steps']} steps per round. Medians of {facts['rounds']} interleaved rounds; "
            f"load of the machine {load}.",
            "",
            "| | seconds per round | relative to the loop | relative to ours | CPU seconds | peak MB "
            "| steps | difference | |",
            "|" + "---|" * 9,
        ]
        for row in facts["rows"]:
            if "failure" in row:
                text.append(f"| {row['name']} | {row['failure']} | - | - | - | - | - | - | - |")
                continue
            cpu = f"{row['cpu']:.2f}" if row["cpu"] else "-"
            steps = ", ".join(map(str, row["steps"])) + ("" if row["same"] else " (DIFFERENT WORK)")
            cells = [row["name"], f"{row['seconds']:.3f}", f"{row['ratio']:.2f}", f"{row['faster']:.2f}", cpu]
            cells.append(f"{row['peak_mb']:.0f}" if row["cpu"] else "-")  # of one process
            text.append("| " + " | ".join([*cells, steps, f"{row['difference']:.1e}", row["note"]]) + " |")
        if facts["checks"]:
            text += ["", "| ours against | required speedup | measured | |", "|---|---|---|---|"]
        for check in facts["checks"]:
            word = "pass" if check["times"] >= check["least"] else "FAIL"
            text.append(f"| {check['other']} | {check['least']:.2f} | {check['times']:.2f} | {word} |")
    return "\n".join(text)


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python interpreter of the other frameworks")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--only", nargs="*", choices=NAMES, help="run only these")
    parser.add_argument("--rounds", type=int, help="number of timed rounds")
    parser.add_argument("--examples", type=int, help="examples per client, for trials")
    parser.add_argument("--docs", type=Path, help="the documentation folder; its benchmarks.md is updated")
    options = parser.parse_args()
    found = []
    for model in options.models:
        names = list(options.only or (NAMES if model == "cnn2" else LONG))
        rounds, examples = options.rounds or ROUNDS[model], options.examples or EXAMPLES[model]
        found.append(compare(model, names, options.python, rounds, examples))
    print(page(found))
    for facts in found if options.docs else ():
        name = f"peers-{platform.machine()}-{facts['model']}"
        command = f"python benchmarks/speed/peers.py --python peers/bin/python --models {facts['model']} --docs docs"
        write_part(options.docs / "benchmarks.md", name, page([facts]), command)


if __name__ == "__main__":
    main()
