"""NVFlare's own PyTorch example in its simulator, unchanged and with the filters of thinwire: accuracy and bytes.

    python benchmarks/bytes/hello_pt.py examples/hello-world/hello-pt --json docs/results/hello-pt.jsonl
    python benchmarks/bytes/hello_pt.py --table docs/results/hello-pt.jsonl --docs docs

The folder is that of NVFlare's repository. CIFAR-10 comes from THINWIRE_DATA instead of torchvision, its first 10,000
training images; a line seeds torch. Two clients, three rounds of an epoch. Bytes are the lengths of tasks and results
as NVFlare serializes them, counted by a filter behind all others at the sending end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from nvflare.apis.filter import Filter
from nvflare.fuel.utils import fobs

from benchmarks.page import write_part
from thinwire.core.text import human_bytes
from thinwire.data.named_images import cifar10

PLAIN = "unchanged"
ROWS = (PLAIN, 'up="drive", down="drive", first="eden"')
IMAGES = 10_000
COMMAND = "python benchmarks/bytes/hello_pt.py --table docs/results/hello-pt.jsonl --docs docs"
DATA = """
from thinwire.data.named_images import cifar10

torch.manual_seed({seed})
Compose = ToTensor = Normalize = lambda *_: None


def _cifar10(train):
    inputs, targets = (cifar10().train if train else cifar10().test).gather(torch.arange({images}))
    return torch.utils.data.TensorDataset((inputs - 0.5) / 0.5, targets)

"""
FILTERS = """
    for end in ("server_output", "client_output"):
        from benchmarks.bytes.hello_pt import Count
        getattr(recipe, f"add_{{end}}_filter")(Count({file!r}), tasks=["train"])
"""


class Count(Filter):  # type: ignore[misc]
    """Writes the length of each message into a file."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        """The message as it is."""
        with open(self.file, "a") as file:
            file.write(f"{self.get_prop('__chain_type')} {len(fobs.dumps(shareable))}\n")
        return shareable


def measure(app: Path, row: str, seed: int) -> dict[str, Any]:
    """One job in the simulator."""
    with TemporaryDirectory() as home:
        folder, counts = Path(home, "app"), Path(home, "counts")
        shutil.copytree(app, folder)
        client = (folder / "client.py").read_text()
        for old, new in (
            ("import torchvision\n", DATA.format(seed=seed, images=IMAGES)),
            ("from torchvision.transforms import Compose, Normalize, ToTensor\n", ""),
            (
                "torchvision.datasets.CIFAR10(root=DATASET_PATH, train=True, download=True, transform=transform)",
                "_cifar10(True)",
            ),
            (
                "torchvision.datasets.CIFAR10(root=DATASET_PATH, train=False, download=True, transform=transform)",
                "_cifar10(False)",
            ),
        ):
            if old not in client:
                raise SystemExit(f"{app}: client.py has no {old!r}")
            client = client.replace(old, new)
        (folder / "client.py").write_text(client)
        job = (folder / "job.py").read_text()
        job = job.replace(
            "    n_clients = args.n_clients\n",
            f"    import torch; torch.manual_seed({seed})\n    n_clients = args.n_clients\n",
        )
        ours = "" if row == PLAIN else f"    from thinwire.nvflare import compressed\n    compressed(recipe, {row})\n"
        job = job.replace("    env = SimEnv(", ours + FILTERS.format(file=str(counts)) + "    env = SimEnv(")
        job = job.replace(
            "num_clients=n_clients)", f"num_clients=n_clients, workspace_root={str(Path(home, 'runs'))!r})"
        )
        (folder / "job.py").write_text(job)
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "job.py", "--num_rounds", "3", "--epochs", "1", "--num_workers", "0"]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        log = done.stdout + done.stderr
        models = list(Path(home).rglob("FL_global_model.pt"))
        if done.returncode or not models or "refused" in log:
            raise SystemExit(log[-6000:])
        weights = torch.load(models[0], weights_only=True)["model"]
        sizes = [line.split() for line in counts.read_text().splitlines()]
        up, down = (sum(int(n) for kind, n in sizes if kind == name) for name in ("task_result", "task_data"))
    net = run_path(str(app / "model.py"))["SimpleNetwork"]()
    net.load_state_dict(weights)
    inputs, targets = cifar10().test.gather(torch.arange(10_000))
    with torch.no_grad():
        accuracy = float((net((inputs - 0.5) / 0.5).argmax(1) == targets).float().mean())
    return {"row": row, "seed": seed, "accuracy": accuracy, "up": up, "down": down, "messages": len(sizes)}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    whole = statistics.mean(row["up"] + row["down"] for row in rows if row["row"] == PLAIN)
    lines = ["| app | accuracy, by seed | results | tasks | of unchanged |", "|" + "---|" * 5]
    for name in dict.fromkeys(row["row"] for row in rows):
        same = [row for row in rows if row["row"] == name]
        up, down = (statistics.mean(row[way] for row in same) for way in ("up", "down"))
        shown = [" ".join(f"{100 * row['accuracy']:.1f}" for row in same), human_bytes(up), human_bytes(down)]
        shown.append("1" if name == PLAIN else f"1/{whole / (up + down):.1f}")
        lines.append(f"| {name if name == PLAIN else f'`{name}`'} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", type=Path, nargs="?", help="the folder of the example")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="arguments of compressed(); or `unchanged`")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--json", type=Path, help="a file that gets one line a run")
    parser.add_argument("--table", type=Path, help="train nothing; read a file that --json wrote")
    parser.add_argument("--docs", type=Path, help="write the table into this folder's deployment.md")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.table.read_text().splitlines()] if options.table else []
    for seed in options.seeds if options.app else []:
        for row in options.rows:
            rows.append(measure(options.app.resolve(), row, seed))
            print(rows[-1], flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    if options.docs:
        write_part(options.docs / "deployment.md", "hello-pt", table(rows), COMMAND)


if __name__ == "__main__":
    main()
