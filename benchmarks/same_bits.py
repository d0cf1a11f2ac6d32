"""Whether two versions of thinwire give the same bits: weights, losses, bytes and messages of every round, by method.

    git worktree add ../before COMMIT
    python benchmarks/same_bits.py ../before                     twelve methods, 10 rounds on digits each
    python benchmarks/same_bits.py ../before --all               every method and combination, 3 rounds each
    python benchmarks/same_bits.py ../before --methods mapo ef+topk+int4 --rounds 50 --backend loop

Each version runs all methods in one process, through `thinwire.run`. A method can be followed by settings:
`fedavg method.secure_aggregation=true`. Weights are compared as bytes, block by block, and so is every message;
exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECURE = "fedavg method.secure_aggregation=true"
FEW = [
    "fedavg",
    "mapo",
    "thin",
    "fedpara",
    "pfedpara",
    "fedlama",
    "flasc",
    "scaffold",
    "evofed",
    "dp-fedadam",
    "ef+topk+int4",
]
MORE = ("ef+topk+int4", "lora+int8", SECURE, "mapo method.secure_aggregation=true")  # beside every preset
STAGES = "method.next_stage.at=1"  # of methods whose second stage begins after more than three rounds
BYTES = ("bytes_up", "bytes_down", "bytes_catchup")
TRAINING = ("weights", "loss", "accuracy", "test_loss")


def result(what: str, on: str, rounds: int, backend: str) -> dict[str, Any]:
    """Run a method with the version that is on the path: hashes of weights and messages, values of all rounds."""
    import torch

    import thinwire as tw

    method, *settings = what.split()
    overrides = {"engine.backend": backend}
    for setting in settings:
        key, value = setting.split("=")
        overrides[key] = json.loads(value)
    messages: dict[tuple[int, str, int], str] = {}

    def on_message(number: int, way: str, client: int, message: bytes) -> None:
        messages[number, way, client] = hashlib.sha256(message).hexdigest()

    try:
        given = {"rounds": rounds, "on_message": on_message, "progress": False}
        if hasattr(tw, "run"):
            run = tw.run(method, on, set=overrides, **given)
        else:  # an older version
            run = tw.run_task(method, on, overrides=overrides, **given)
    except tw.ThinwireError as error:  # the same for both versions, or a difference
        return {"error": str(error)}
    digest = hashlib.sha256()
    for name, block in sorted({**run.weights, **run.buffers}.items()):
        digest.update(name.encode() + block.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    values = {key: [getattr(record, key) for record in run.history] for key in (*BYTES, *TRAINING[1:])}
    sent = hashlib.sha256(repr(sorted(messages.items())).encode()).hexdigest()
    return {"weights": digest.hexdigest()[:16], "messages": f"{len(messages)} {sent[:16]}", **values}


def results(tree: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results of all methods with the version in a folder, from one process."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "THINWIRE_PROBE": "off", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tree), "--print", "--on", options.on, "--backend", options.backend]
    command += ["--rounds", str(options.rounds), "--methods", *options.methods]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: exit status {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def every_method() -> list[str]:
    """All presets of this checkout, combinations, and methods with secure sums."""
    command = [sys.executable, "-m", "thinwire", "list", "methods", "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    names = [one["name"] for one in json.loads(done.stdout)]
    return [*(f"{name} {STAGES}" if name in ("flora", "slora") else name for name in names), *MORE]


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the folder of the other version")
    parser.add_argument("--methods", nargs="*", default=[*FEW, SECURE])
    parser.add_argument("--all", action="store_true", help="every method; 3 rounds each unless --rounds is given")
    parser.add_argument("--on", default="digits")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--backend", default="vmap", help="vmap, loop, threads, chain or graph")
    parser.add_argument("--training", action="store_true", help="compare weights and losses, not bytes")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.all else 10)
    if options.print:
        import thinwire

        assert Path(str(thinwire.__file__)).is_relative_to(options.before), thinwire.__file__
        print(json.dumps({what: result(what, options.on, options.rounds, options.backend) for what in options.methods}))
        return
    if options.all:
        options.methods = every_method()
    before, after = (results(tree, options) for tree in (options.before.resolve(), ROOT))
    different = []
    for what in options.methods:
        old, new = before[what], after[what]
        names = TRAINING if options.training else sorted({**old, **new})
        wrong = [name for name in names if old.get(name) != new.get(name)]
        if wrong:
            different.append(what)
        shown = new.get("error") or f"weights {new['weights']}  bytes {[sum(new[key]) for key in BYTES]}"
        print(f"{what:40} {shown}  {'DIFFERENT: ' + ', '.join(wrong) if wrong else 'same'}")
    print(f"{len(options.methods) - len(different)} of {len(options.methods)} the same")
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
