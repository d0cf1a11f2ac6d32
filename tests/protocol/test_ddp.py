"""The communication hook of DistributedDataParallel, on two real processes."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.protocol.ddp import CodecState, codec_hook

STEPS = 20


def _train(rank: int, folder: str) -> None:
    """What a process of the group does: the same training with several codecs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    out = {}
    for codec in ("", "raw", "topk+int4", "int8", "nan"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        model = DistributedDataParallel(net, bucket_cap_mb=0.02)
        state = CodecState(codec if codec not in ("", "nan") else "int8")
        if codec:
            model.register_comm_hook(state, codec_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        losses, bad = [], []
        for step in range(STEPS):
            x = torch.randn(128, 64, generator=generator)
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
            optimizer.zero_grad()
            (loss * (float("inf") if (codec, step, rank) == ("nan", 3, 1) else 1.0)).backward()
            if all(one.grad.isfinite().all() for one in net.parameters()):
                optimizer.step()
            else:
                bad.append(step)
            losses.append(float(loss.detach()))
        weights = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        out[codec] = {"weights": weights, "sent": state.sent, "losses": losses, "bad": bad}
    torch.save(out, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@cache
def _trained() -> list[dict]:
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train, (folder,), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


pytestmark = pytest.mark.xdist_group("ddp")


@pytest.mark.parametrize("codec", ["raw", "topk+int4", "int8", "nan"])
def test_models_of_all_workers_stay_equal(codec):
    first, second = (one[codec]["weights"] for one in _trained())
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_whole_messages_train_as_without_a_hook():
    out = _trained()[0]
    assert torch.allclose(out["raw"]["weights"], out[""]["weights"], atol=1e-6)


def test_short_messages_train_nearly_as_well():
    out = _trained()[0]
    assert out["topk+int4"]["losses"][-1] < out["topk+int4"]["losses"][1] - 0.1
    assert out["topk+int4"]["losses"][-1] < out[""]["losses"][-1] + 0.1
    later = (STEPS - 1) / STEPS  # the first step is sent whole
    assert out["topk+int4"]["sent"] - out["raw"]["sent"] / STEPS < out["raw"]["sent"] * later / 20


def test_a_gradient_that_is_not_finite_is_one_for_all_workers():
    assert [one["nan"]["bad"] for one in _trained()] == [[3], [3]]
