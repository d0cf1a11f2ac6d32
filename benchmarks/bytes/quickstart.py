"""Flower's own PyTorch quickstart, unchanged and with the lines of thinwire: accuracy and bytes.

    flwr new @flwrlabs/quickstart-pytorch                     # or examples/quickstart-pytorch of Flower's repository
    python benchmarks/bytes/quickstart.py quickstart-pytorch --json docs/results/quickstart.jsonl
    python benchmarks/bytes/quickstart.py --table docs/results/quickstart.jsonl --docs docs

Its CIFAR-10 comes from a hub; here its two functions that load data are replaced by ones that read the folder of
THINWIRE_DATA, with as many images for each client and the same transforms, and a line seeds torch. All else is the app:
three rounds, ten clients, evaluation of half of them, in real processes over TLS. With thinwire, two lines import, and
two have `mods=[compressed_mod]` and `strategy = compressed(strategy, ...)`. Bytes are those that Flower's SuperLink
counts for the run (`flwr list`): everything that clients pull and push, the first round and evaluations included.
Needs no package of the app but Flower and torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import write_part
from thinwire.core.text import human_bytes
from thinwire.flower.local import CONNECTION, Processes, start_nodes, start_superlink

PLAIN = "unchanged"
ROWS = (PLAIN, 'up="drive", down="drive", first="eden"')
NODES = 10
COMMAND = "python benchmarks/bytes/quickstart.py --table docs/results/quickstart.jsonl --docs docs"
DATA = """

from thinwire.data.named_images import cifar10

torch.manual_seed({seed})


def _loader(examples, rows, batch_size, shuffle=False):
    inputs, targets = examples.gather(rows)
    pairs = [{{"img": (one - 0.5) / 0.5, "label": label}} for one, label in zip(inputs, targets)]
    return DataLoader(pairs, batch_size=batch_size, shuffle=shuffle)


def load_data(partition_id, num_partitions, batch_size):
    examples = cifar10().train
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(42))[partition_id::num_partitions]
    cut = len(order) * 4 // 5
    return _loader(examples, order[:cut], batch_size, True), _loader(examples, order[cut:], batch_size)


def load_centralized_dataset():
    examples = cifar10().test
    return _loader(examples, torch.arange(len(examples)), 128)
"""


def write_app(app: Path, folder: Path, row: str, seed: int) -> None:
    """A copy of the app with other data and, except for `unchanged`, with compressed messages."""
    shutil.copytree(app, folder)
    (package,) = {file.parent for file in folder.glob("*/task.py")}
    task = re.sub(
        r"from (datasets|flwr_datasets|torchvision)\b.*|pytorch_transforms = .*", "", (package / "task.py").read_text()
    )
    (package / "task.py").write_text(task + DATA.format(seed=seed))
    if row == PLAIN:
        return
    for name, old, new in (
        ("client_app", "app = ClientApp()", "app = ClientApp(mods=[compressed_mod])"),
        ("server_app", "strategy = FedAvg(fraction_evaluate=fraction_evaluate)", None),
    ):
        file = package / f"{name}.py"
        text, what = file.read_text(), "compressed_mod" if new else "compressed"
        if text.count(old) != 1:
            raise SystemExit(f"{file}: expected one line {old!r}")
        text = text.replace(old, new or f"{old}\n    strategy = compressed(strategy, {row})")
        file.write_text(
            text.replace("import torch\n", f"import torch\nfrom thinwire.flower.compressed import {what}\n")
        )


def measure(app: Path, row: str, seed: int, config: str, processes: Processes) -> dict[str, Any]:
    """One run of the app."""
    folder, name = processes.home / "app", f"run-{time.time_ns()}"
    shutil.rmtree(folder, ignore_errors=True)
    write_app(app, folder, row, seed)
    options = ["-c", config] if config else []
    processes.start(name, ["flwr", "run", str(folder), CONNECTION, "--stream", *options]).wait()
    log = "\n".join(processes.log(name))
    found = [float(one) for one in re.findall(r"'accuracy': '?([0-9.e+-]+)", log)]
    processes.start("list", ["flwr", "list", CONNECTION, "--format", "json"]).wait()
    last = json.loads("\n".join(processes.log("list")))["runs"][0]
    if not found or last["status"] != "finished:completed" or "refused" in log:
        raise SystemExit(f"{last['status']}\n{log[-4000:]}")
    traffic = last["network-traffic"]
    known = {"row": row, "seed": seed, "config": config, "accuracy": found[-1]}
    return known | {"up": traffic["inbound-bytes"], "down": traffic["outbound-bytes"], "seconds": last["elapsed"]}


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| setting | app | accuracy, by seed | mean | sent by clients | received | of unchanged |",
        "|" + "---|" * 7,
    ]
    for config in dict.fromkeys(row["config"] for row in rows):
        among = [row for row in rows if row["config"] == config]
        whole = statistics.mean(row["up"] + row["down"] for row in among if row["row"] == PLAIN)
        for name in dict.fromkeys(row["row"] for row in among):
            same = sorted((row for row in among if row["row"] == name), key=lambda row: row["seed"])
            up, down = (statistics.mean(row[way] for row in same) for way in ("up", "down"))
            accuracies = [100 * row["accuracy"] for row in same]
            shown = [" ".join(f"{one:.1f}" for one in accuracies), f"{statistics.mean(accuracies):.1f} %"]
            shown += [human_bytes(up), human_bytes(down), "1" if name == PLAIN else f"1/{whole / (up + down):.1f}"]
            what = name if name == PLAIN else f"`{name}`"
            lines.append(f"| {config or 'as it is'} | {what} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", type=Path, nargs="?", help="the folder of the quickstart")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="arguments of compressed(); or `unchanged`")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--config", default="", help="settings of the app, as for flwr run -c")
    parser.add_argument("--json", type=Path, help="a file that gets one line a run")
    parser.add_argument("--table", type=Path, help="train nothing; read a file that --json wrote")
    parser.add_argument("--docs", type=Path, help="write the table into this folder's deployment.md")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.table.read_text().splitlines()] if options.table else []
    if options.app:
        with TemporaryDirectory() as home, Processes(Path(home) / "home", None) as processes:
            processes.home.mkdir()
            link = start_superlink(processes, NODES)
            start_nodes(processes, link, link.port, Path(home))
            for seed in options.seeds:
                for row in options.rows:
                    rows.append(measure(options.app, row, seed, options.config, processes))
                    print(rows[-1], flush=True)
                    if options.json:
                        with options.json.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    if options.docs:
        write_part(options.docs / "deployment.md", "quickstart", table(rows), COMMAND)


if __name__ == "__main__":
    main()
