"""Whether two versions of thinwire give the same bits: final weights, losses and bytes of every round, by method.

    git worktree add ../before COMMIT
    python benchmarks/same_bits.py ../before                     twelve methods, 10 rounds on digits each
    python benchmarks/same_bits.py ../before --methods mapo thin --rounds 50

Both versions run through their own command line, in separate processes, with the same backend. Names of files and
settings may differ: `RENAMED` has the settings of versions before the names of the field. Weights are compared as
bytes, block by block; exits with 1 if anything differs.
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

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
METHODS: dict[str, list[str]] = {
    **{
        name: [name]
        for name in ("fedavg", "mapo", "thin", "fedpara", "pfedpara", "fedlama", "flasc", "scaffold", "evofed")
    },
    "dp-fedadam": ["dp-fedadam"],
    "secure sums": ["fedavg", "--set", "method.secure_aggregation=true"],
    "ef+topk+int4": ["ef+topk+int4"],
}
RENAMED = {"method.secure_aggregation=true": "method.secure=true"}
# a version with recipes: the settings that a preset had before
OLD_MAPO = ["mapo", *(f"--set=method.{key}" for key in ("space.scale=unit", "space.k=128", "client_opt.lr=3.0"))]
OLD_CODEC = "{kind='quantize', bits=4, stochastic=true}"
OLD_LORA = [f"--set=method.{key}" for key in ("space.init_lora_weights=kaiming", "space.dense=none")]
STATED = {
    "mapo": OLD_MAPO,
    "thin": [*OLD_MAPO, "--set=method.space.redraw_every=5"]
    + [f"--set=method.{slot}={OLD_CODEC}" for slot in ("up", "down", "merge_codec")],
    "fedpara": ["fedpara-paper"],
    "flasc": ["flasc", *OLD_LORA, "--set=method.server_opt.lr=0.01"],
}
BYTES = ("bytes_up", "bytes_down", "bytes_catchup")


def result(tree: Path, words: list[str], rounds: int) -> dict[str, Any]:
    """Run a method with one version; the hash of its final weights, and losses and bytes of all rounds."""
    if not (tree / "thinwire/protocol").is_dir():  # a version before the names of the field
        words = [RENAMED.get(word, word) for word in words]
    if (tree / "thinwire/presets/recipes").is_dir():
        words = [*STATED.get(words[0], words[:1]), *words[1:], "--recipe", "paper"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "THINWIRE_PROBE": "off", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "thinwire", "run", *words, "--on", "digits", "--rounds", str(rounds)]
        done = subprocess.run(
            [*command, "--out", str(out), "--quiet"], env=environment, cwd=folder, capture_output=True, text=True
        )
        if done.returncode not in (0, 3):  # 3: the run ended at chance, which is a result
            raise SystemExit(f"{tree}: {' '.join(words)}: {done.stderr.strip()[-500:]}")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(out / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].tobytes())
    sums = {key: sum(line[key] for line in lines) for key in BYTES}
    each = [[line["loss"], *(line[key] for key in BYTES)] for line in lines]
    return {"weights": digest.hexdigest()[:16], "rounds": each, **sums}


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the folder of the other version")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--training", action="store_true", help="compare weights and losses, not bytes")
    options = parser.parse_args()
    different = []
    for name in options.methods:
        old, new = (result(tree, METHODS[name], options.rounds) for tree in (options.before.resolve(), ROOT))
        same = _training(old) == _training(new) if options.training else old == new
        if not same:
            different.append(name)
        verdict = "same" if same else f"DIFFERENT: {old['weights']} {[old[key] for key in BYTES]}"
        print(f"{name:14} weights {new['weights']}  bytes {[new[key] for key in BYTES]}  {verdict}", flush=True)
    raise SystemExit(f"different: {', '.join(different)}" if different else 0)


def _training(result: dict[str, Any]) -> tuple[str, list[float]]:
    """The weights and the losses of a result: what does not depend on the format of messages."""
    return result["weights"], [one[0] for one in result["rounds"]]


if __name__ == "__main__":
    main()
