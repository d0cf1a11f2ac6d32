"""A trainer for a site with several GPUs: torchrun starts the site, and rank 0 speaks to the server.

    torchrun --standalone --nproc-per-node 4 examples/several_gpus.py site start --superlink server.example:443 ...
    torchrun --standalone --nproc-per-node 4 examples/several_gpus.py run fedavg --on digits \\
        --set local.trainer=examples/several_gpus.py:fit

Rank 0 is the command of thinwire after the name of this file; an app has the trainer by `thinwire app ... --set
local.trainer=examples/several_gpus.py:fit`. Flower gives each message a process of its own. That process takes the
place of rank 0 in a process group, which the waiting ranks join for one training. All train by
DistributedDataParallel, each on its part of every batch, so the result is that of one process, up to rounding; batch
norm has statistics of its part. A rank that fails ends the site; `--max-restarts` starts it again.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def fit(model, records, lr):
    """Train on all GPUs of this machine, as rank 0."""
    weights, loss = train(store().add("trainings", 1), 0, [model, list(records.batches()), lr])
    model.load_state_dict(weights)
    return model, loss


def store():
    """Where the processes of torchrun find each other."""
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore("several_gpus/" + os.environ["TORCHELASTIC_RESTART_COUNT"], server)


def train(number, rank, work):
    """One process of a training; the others receive what rank 0 has."""
    kind, group = "gloo", dist.PrefixStore(str(number), store())
    if torch.cuda.is_available():
        kind = "cpu:gloo,cuda:nccl"
    dist.init_process_group(kind, store=group, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    for objects in (paths := [sys.path], work):  # paths first: the class of the model may be of a file of rank 0
        dist.broadcast_object_list(objects, device=torch.device("cpu"))
        sys.path[:] = paths[0]
    done = steps(*work, rank, dist.get_world_size())
    dist.destroy_process_group()  # after DistributedDataParallel is gone: it hangs if it ends the group itself
    return done


def steps(model, batches, lr, rank, size):
    """The steps of one process; returns the weights and the loss."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    model = model.to(device)
    parallel = DistributedDataParallel(model)
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
    return {name: one.cpu() for name, one in model.state_dict().items()}, float(total)


def wait(rank):
    """Join each training that rank 0 begins, until it has ended."""
    shared, last = store(), 0
    while not shared.add("ended", 0):
        if (number := shared.add("trainings", 0)) > last:
            train(number, rank, [None, None, None])
            last = number
        time.sleep(0.02)


if __name__ == "__main__":
    if rank := int(os.environ["RANK"]):
        wait(rank)
    else:
        from thinwire.cli.app import main

        try:
            sys.exit(main())
        finally:
            store().add("ended", 1)
