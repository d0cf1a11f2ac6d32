"""From a CSV of pictures or tensors to a page that compares methods: your network, your files, a few minutes.

Run: python examples/compare_on_your_data.py [your.csv]

The CSV has a line for each example: `file,label,client`. A file is a picture, or a tensor of shape (channels, height,
width) as .npy or .pt; paths are relative to the CSV, all examples are of one size, and a client is whoever holds the
example. Without a CSV, handwritten digits are written out as pictures and used. Everything goes into the folder
`comparison`. Needs Pillow: pip install pillow
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import thinwire as tw


def write_digits(folder):
    """Pictures and a CSV to try this with."""
    from sklearn.datasets import load_digits

    (folder / "digits").mkdir(exist_ok=True)
    lines = ["file,label,client"]
    for i, (picture, label) in enumerate(zip(*load_digits(n_class=10, return_X_y=True), strict=True)):
        Image.fromarray((picture.reshape(8, 8) * 15).astype(np.uint8)).save(folder / f"digits/{i}.png")
        lines.append(f"digits/{i}.png,{label},client {i % 8}")
    (folder / "digits.csv").write_text("\n".join(lines) + "\n")
    return folder / "digits.csv"


def read_example(file):
    """A tensor (channels, height, width) from a picture, an array or a tensor."""
    if file.suffix == ".pt":
        return torch.load(file, weights_only=True).float()
    if file.suffix == ".npy":
        return torch.tensor(np.load(file, allow_pickle=False), dtype=torch.float32)
    return torch.tensor(np.asarray(Image.open(file).convert("L"), np.float32) / 255).unsqueeze(0)


def read_table(file):
    """One (inputs, targets) pair for each client, and a fifth of all examples to test on."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    labels = sorted({row["label"] for row in rows})
    inputs = torch.stack(
        [read_example(file.parent / row["file"]) for row in rows]
    )  # (examples, channels, height, width)
    targets = torch.tensor([labels.index(row["label"]) for row in rows])
    tested = torch.arange(len(rows)) % 5 == 4
    clients = []
    for name in sorted({row["client"] for row in rows}):
        own = torch.tensor([row["client"] == name for row in rows]) & ~tested
        if own.any():
            clients.append((inputs[own], targets[own]))
    return clients, (inputs[tested], targets[tested]), len(labels)


class Net(nn.Module):
    """A network of your own: any nn.Module will do."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 12, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Linear(12 * 16, classes)

    def forward(self, x):
        """(examples, channels, height, width) to (examples, classes)."""
        return self.head(self.pool(self.conv(x).relu()).flatten(1))


def main():
    """Train every method twice, and write the page."""
    folder = Path("comparison")
    folder.mkdir(exist_ok=True)
    table = Path(sys.argv[1]) if sys.argv[1:] else write_digits(folder)
    clients, test, classes = read_table(table)
    methods = {
        "fedavg": tw.Method(client_opt=tw.SGD(0.3)),
        "top 10 %": tw.Method(up=tw.TopK(0.1), down=tw.TopK(0.1), client_opt=tw.SGD(0.3)),
        "mapo": tw.Method(space=tw.MAPO(k=64, redraw_every=10), client_opt=tw.SGD(3.0)),
    }
    runs = []
    for name, method in methods.items():
        for seed in (0, 1):  # two seeds: two first draws of the weights, two orders of the clients
            torch.manual_seed(seed)
            out, model = folder / f"runs/{name}-{seed}", Net(test[0].shape[1], classes)
            how = {"rounds": 20, "cohort": min(5, len(clients)), "eval_every": 2, "seed": seed}
            run = tw.simulate(model, clients, method, test=test, out=out, name=name, **how)
            print(f"{name}, seed {seed}: accuracy {run.accuracy:.3f}, {run.bytes_total:,} bytes")
            runs.append(run)
    page = folder / "page.html"
    tw.report(runs, html=page)
    print("open", page)


if __name__ == "__main__":
    main()
