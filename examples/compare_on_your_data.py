"""From a CSV of pictures to a page that compares methods: your network, your files, a few minutes.

Run: python examples/compare_on_your_data.py [your.csv]

The CSV has a line for each picture: `file,label,client` (paths relative to the CSV; all pictures of one size; a client
is whoever holds the picture). Without one, handwritten digits are written out as pictures and used. Everything goes
into the folder `comparison`. Needs Pillow: pip install pillow
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


def read_pictures(file):
    """One (inputs, targets) pair for each client, and a fifth of everybody's pictures to test on."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    labels = sorted({row["label"] for row in rows})
    pictures = [np.asarray(Image.open(file.parent / row["file"]).convert("L"), np.float32) / 255 for row in rows]
    inputs = torch.tensor(np.stack(pictures)).unsqueeze(1)  # (pictures, 1, height, width)
    targets = torch.tensor([labels.index(row["label"]) for row in rows])
    tested = torch.arange(len(rows)) % 5 == 4
    clients = []
    for name in sorted({row["client"] for row in rows}):
        own = torch.tensor([row["client"] == name for row in rows]) & ~tested
        clients.append((inputs[own], targets[own]))
    return clients, (inputs[tested], targets[tested]), len(labels)


class Net(nn.Module):
    """A network of your own: any nn.Module will do."""

    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Linear(12 * 16, classes)

    def forward(self, x):
        """(pictures, 1, height, width) to (pictures, classes)."""
        return self.head(self.pool(self.conv(x).relu()).flatten(1))


def main():
    """Train every method twice, and write the page."""
    folder = Path("comparison")
    folder.mkdir(exist_ok=True)
    table = Path(sys.argv[1]) if sys.argv[1:] else write_digits(folder)
    clients, test, classes = read_pictures(table)
    methods = {
        "fedavg": tw.Method(client_opt=tw.SGD(0.3)),
        "top 10 %": tw.Method(up=tw.TopK(0.1), down=tw.TopK(0.1), client_opt=tw.SGD(0.3)),
        "mapo": tw.Method(space=tw.MAPO(k=64, fresh_every=10), client_opt=tw.SGD(3.0)),
    }
    runs = []
    for name, method in methods.items():
        for seed in (0, 1):  # two seeds: two first draws of the weights, two orders of the clients
            torch.manual_seed(seed)
            out, model = folder / f"runs/{name}-{seed}", Net(classes)
            run = tw.simulate(
                model, clients, method, rounds=20, cohort=5, test=test, seed=seed, out=out, name=name, eval_every=2
            )
            print(f"{name}, seed {seed}: accuracy {run.accuracy:.3f}, {run.bytes_total:,} bytes")
            runs.append(run)
    page = folder / "page.html"
    tw.report(runs, html=page)
    print("open", page)


if __name__ == "__main__":
    main()
