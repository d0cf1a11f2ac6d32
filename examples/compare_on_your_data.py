"""Compare methods on a CSV of images or tensors, with your own network, and write a page.

Run: python examples/compare_on_your_data.py [your.csv]

The CSV has one row per example: `file,label,client`. A file is an image, or a tensor of shape (channels, height, width)
as .npy or .pt; paths are relative to the CSV, and all examples have the same size. Without a CSV, handwritten digits
are written as images and used. All output is in the folder `comparison`. Needs Pillow: pip install pillow
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
    """Write the digits as images, and their CSV."""
    from sklearn.datasets import load_digits

    (folder / "digits").mkdir(exist_ok=True)
    lines = ["file,label,client"]
    for i, (image, label) in enumerate(zip(*load_digits(n_class=10, return_X_y=True), strict=True)):
        Image.fromarray((image.reshape(8, 8) * 15).astype(np.uint8)).save(folder / f"digits/{i}.png")
        lines.append(f"digits/{i}.png,{label},client {i % 8}")
    (folder / "digits.csv").write_text("\n".join(lines) + "\n")
    return folder / "digits.csv"


def read_example(file):
    """Read an image, an array or a tensor as a tensor (channels, height, width)."""
    if file.suffix == ".pt":
        return torch.load(file, weights_only=True).float()
    if file.suffix == ".npy":
        return torch.tensor(np.load(file, allow_pickle=False), dtype=torch.float32)
    return torch.tensor(np.asarray(Image.open(file).convert("L"), np.float32) / 255).unsqueeze(0)


def read_table(file):
    """Read the CSV: an (inputs, targets) pair per client, the test set (a fifth of all examples), and the classes."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    labels = sorted({row["label"] for row in rows})
    inputs = torch.stack(
        [read_example(file.parent / row["file"]) for row in rows]
    )  # (examples, channels, height, width)
    targets = torch.tensor([labels.index(row["label"]) for row in rows])
    is_test = torch.arange(len(rows)) % 5 == 4
    clients = []
    for name in sorted({row["client"] for row in rows}):
        mine = torch.tensor([row["client"] == name for row in rows]) & ~is_test
        if mine.any():
            clients.append((inputs[mine], targets[mine]))
    return clients, (inputs[is_test], targets[is_test]), len(labels)


class Net(nn.Module):
    """Replace this with your network: any nn.Module."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 12, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Linear(12 * 16, classes)

    def forward(self, x):
        """(examples, channels, height, width) to (examples, classes)."""
        return self.head(self.pool(self.conv(x).relu()).flatten(1))


def main():
    """Train every method with two seeds, and write the page."""
    folder = Path("comparison")
    folder.mkdir(exist_ok=True)
    table = Path(sys.argv[1]) if sys.argv[1:] else write_digits(folder)
    clients, test, classes = read_table(table)
    methods = {
        "fedavg": tw.Method(),
        "top 10 %": tw.Method(up=tw.codecs.TopK(0.1), down=tw.codecs.TopK(0.1)),
        "mapo": tw.methods.mapo(k=64, redraw_every=10),
    }
    runs = []
    for name, method in methods.items():
        method = method.replace(client_opt=tw.optimizers.SGD(0.1))  # the same for all
        for seed in (0, 1):  # other initial weights, cohorts and batches
            torch.manual_seed(seed)
            out, model = folder / f"runs/{name}-{seed}", Net(test[0].shape[1], classes)
            settings = {"rounds": 20, "cohort": min(5, len(clients)), "eval_every": 2, "seed": seed}
            run = tw.simulate(model, clients, method, test=test, out=out, resume=True, name=name, **settings)
            print(f"{name}, seed {seed}: accuracy {run.accuracy:.3f}, {run.bytes_total:,} bytes")
            runs.append(run)
    page = folder / "page.html"
    tw.report(runs, html=page)
    print("open", page)


if __name__ == "__main__":
    main()
