"""A plain loop over clients, as anybody writes it: what `speed.py` compares backends with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from thinwire.core.parallel import compute_with
from thinwire.data.losses import cross_entropy
from thinwire.federation.federation import Federation
from thinwire.models.lstm import NextCharacter


def as_anybody_writes_it(module: torch.nn.Module) -> torch.nn.Module:
    """The model of the plain loop: a copy; an LSTM as `nn.LSTM`, whose weights have the same names."""
    model = copy.deepcopy(module).train()
    if isinstance(model, NextCharacter):
        ours = model.lstm
        model.lstm = _LastState(ours.weight_ih_l0.shape[1], ours.hidden, ours.layers).to(ours.weight_ih_l0.device)
        model.lstm.load_state_dict(ours.state_dict())
    return model


class _LastState(torch.nn.LSTM):
    """`nn.LSTM` that returns the last hidden state."""

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__(inputs, hidden, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0][:, -1]  # type: ignore[no-any-return]


@contextmanager
def rounded(start: torch.nn.Module, precision: str) -> Iterator[None]:
    """Compute as plain PyTorch does in a precision; for float32 the weights are one bit off. Nothing for ""."""
    device = next(start.parameters()).device
    if precision == "float32":
        with torch.no_grad():
            for block in start.parameters():
                block.mul_(1 + 2**-23)
    with (
        compute_with(device, "tf32") if precision == "tf32" else nullcontext(),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
    ):
        yield


def plain(
    simulation: Federation,
    cohort: tuple[int, ...],
    lr: float,
    last: dict[str, torch.Tensor] | None = None,
    precision: str = "",
) -> tuple[dict[str, torch.Tensor], int]:
    """A plain loop: one model, one optimizer, one client after another. Returns mean weights and number of steps.

    The contribution of the last step of each client to the mean is stored in `last`. `precision` is that of `rounded`.
    """
    start = as_anybody_writes_it(simulation.model.module)
    with rounded(start, precision):
        return plain_steps(simulation, cohort, lr, start, last)


def plain_steps(
    simulation: Federation,
    cohort: tuple[int, ...],
    lr: float,
    start: torch.nn.Module,
    last: dict[str, torch.Tensor] | None,
) -> tuple[dict[str, torch.Tensor], int]:
    """The steps of `plain`, from this model."""
    work = simulation.sampler.workload(0, cohort)
    total = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    steps = 0
    for i in range(len(cohort)):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for s, rows in enumerate(work.rows[i].tolist()):
            x, y = work.gather(work.index[i, s, :rows])
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).mean().backward()
            optimizer.step()
            steps += 1
        for name, p in model.named_parameters():
            total[name] += p.detach() / len(cohort)
            if last is not None and p.grad is not None:
                last[name] = last.get(name, 0) - lr * p.grad / len(cohort)
    return total, steps
