"""Train a transformer on two processes of torch.distributed, with our communication hook and with PowerSGD's.

    python benchmarks/bytes/ddp.py --json docs/results/ddp.jsonl
    python benchmarks/bytes/ddp.py --table docs/results/ddp.jsonl --docs docs

A character model of ten million parameters on tiny Shakespeare, two gloo processes with a batch each, AdamW, the same
batches and initial weights in every row. Bytes are those that one worker sends: of our hook the lengths of its
messages, otherwise the lengths of the tensors that go into an all-reduce, counted where they go in. The first two steps
of PowerSGD are whole (`start_powerSGD_iter`), the first one of our hook. Loss: mean of the last ten steps and of both
workers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.page import write_part
from benchmarks.stranger_tasks import CharTransformer
from thinwire.core.text import human_bytes
from thinwire.protocol.ddp import CodecState, codec_hook

ROWS = ("no hook", "PowerSGD, rank 1", "PowerSGD, rank 4", "PowerSGD, rank 16", "int8", "eden", "topk+int4")
LENGTH, BATCH, WIDTH = 64, 8, 792
COMMAND = "python benchmarks/bytes/ddp.py --table docs/results/ddp.jsonl --docs docs"


def _batches(rank: int, steps: int) -> tuple[Tensor, int]:
    """Characters as numbers, (steps, BATCH, LENGTH + 1), and how many there are."""
    path = Path(os.environ["THINWIRE_DATA"]) / "tinyshakespeare" / "input.txt"
    known, text = torch.tensor(list(path.read_bytes())).unique(return_inverse=True)
    starts = torch.randint(len(text) - LENGTH, (steps, BATCH), generator=torch.Generator().manual_seed(rank))
    return text[starts[..., None] + torch.arange(LENGTH + 1)], len(known)


class _Reduced:
    """Bytes of the tensors that go into `all_reduce`."""

    def __init__(self) -> None:
        self.sent, self._all_reduce = 0, dist.all_reduce

    def __call__(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        self.sent += tensor.nbytes
        return self._all_reduce(tensor, *args, **options)


def _worker(rank: int, folder: str, row: str, steps: int) -> None:
    """One process of the group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    (batches, characters), reduced = _batches(rank, steps), _Reduced()
    torch.manual_seed(0)
    net = CharTransformer(characters, LENGTH, WIDTH, heads=8)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**30  # one bucket: PowerSGD's messages of several cross each other under gloo
    model, state = DistributedDataParallel(net, bucket_cap_mb=1000), None
    parameters = sum(one.numel() for one in net.parameters())
    if row.startswith("PowerSGD"):
        dist.all_reduce = reduced
        rank_of = int(row.rsplit(" ", 1)[1])
        options = powerSGD_hook.PowerSGDState(None, rank_of, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(options, powerSGD_hook.powerSGD_hook)
    elif row != "no hook":
        state = CodecState(row)
        model.register_comm_hook(state, codec_hook)
    optimizer, losses, began = torch.optim.AdamW(net.parameters(), 1e-3), [], time.perf_counter()
    for one in batches:
        scores = model(one[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), one[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-10:]).mean()
    dist.all_reduce(last)
    if rank == 0:
        sent = state.sent if state else reduced.sent or 4 * parameters * steps
        found = {"row": row, "parameters": parameters, "steps": steps, "loss": float(last) / 2, "sent": sent}
        Path(folder, "row.json").write_text(json.dumps(found | {"seconds": (time.perf_counter() - began) / steps}))
    dist.destroy_process_group()


def measure(row: str, steps: int) -> dict[str, Any]:
    """The result of one row."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (folder, row, steps), nprocs=2)
        return json.loads(Path(folder, "row.json").read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, and what was trained."""
    whole = rows[0]["sent"]
    lines = [
        "| gradients | sent by a worker in a step | of whole gradients | loss | seconds a step |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        share = "1" if row["sent"] == whole else f"1/{whole / row['sent']:.0f}"
        sent = human_bytes(row["sent"] / row["steps"])
        lines.append(f"| {row['row']} | {sent} | {share} | {row['loss']:.3f} | {row['seconds']:.2f} |")
    what = f"{rows[0]['parameters']:,} parameters, two processes, {rows[0]['steps']} steps, one seed."
    return "\n".join([*lines, "", what])


def main() -> None:
    """Train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="hooks; a codec by its name")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="a file that gets one line a row")
    parser.add_argument("--table", type=Path, help="train nothing; read a file that --json wrote")
    parser.add_argument("--docs", type=Path, help="write the table into this folder's deployment.md")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.table.read_text().splitlines()] if options.table else []
    for row in [] if options.table else options.rows:
        rows.append(measure(row, options.steps))
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    if options.docs:
        write_part(options.docs / "deployment.md", "ddp", table(rows), COMMAND)


if __name__ == "__main__":
    main()
