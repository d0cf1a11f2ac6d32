"""A trainer for a site with several GPUs: each local training is a `torchrun` of this file.

    thinwire run fedavg --on digits --set local.trainer=examples/several_gpus.py:fit

The process that receives models and sends updates, of a simulation or a Flower node, has no process group: it writes
the work into a temporary folder, torchrun starts a process for each GPU, these train with DistributedDataParallel, and
rank 0 writes the weights back. The environment variable PROCESSES sets their number, 1 without a GPU. Each process has
its part of every batch, so the result is that of one process, up to rounding; batch norm has statistics of its part.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def fit(model, records, lr):
    """Train on all GPUs of this machine."""
    processes = os.environ.get("PROCESSES") or str(torch.cuda.device_count() or 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    with TemporaryDirectory() as folder:
        torch.save((model, list(records.batches()), lr), Path(folder, "work.pt"))
        subprocess.run([*command, __file__, folder], check=True)
        loss, weights = torch.load(Path(folder, "done.pt"), weights_only=True)
    model.load_state_dict(weights)
    return model, loss


def work(folder):
    """One process of torchrun."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    model, batches, lr = torch.load(Path(folder, "work.pt"), weights_only=False)  # `fit` has just written it
    parallel = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    total = torch.zeros((), device=device)
    for inputs, targets in batches:
        part = slice(rank, None, size)
        scores = parallel(inputs[part].to(device))
        loss = cross_entropy(scores, targets[part].to(device), reduction="sum") / len(targets)
        optimizer.zero_grad()
        (loss * size).backward()  # DistributedDataParallel takes the mean over processes
        optimizer.step()
        total += loss.detach() / len(batches)
    dist.all_reduce(total)
    if rank == 0:
        weights = {name: one.cpu() for name, one in model.state_dict().items()}
        torch.save((float(total), weights), Path(folder, "done.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1])
