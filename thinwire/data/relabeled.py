"""Examples with other targets than their own; the inputs are shared.

>>> import torch
>>> from thinwire.data.examples import Arrays
>>> pool = Relabeled(Arrays(torch.arange(3.0), torch.tensor([0, 1, 2])), torch.tensor([2, 1, 0]))
>>> pool.gather(torch.tensor([0, 2]))[1].tolist()
[2, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.core.key import Device
from thinwire.data.examples import Examples, Inputs


@dataclass(frozen=True, eq=False)
class Relabeled(Examples):
    """Examples whose targets are replaced, one row each."""

    examples: Examples
    targets: Tensor

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def variants(self) -> int:  # type: ignore[override]
        """Those of the examples."""
        return self.examples.variants

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs of the examples, and the targets that replace theirs."""
        return self.examples.gather(index)[0], self.targets[index % len(self)]

    def to(self, device: Device) -> Relabeled:
        """The same examples on another device."""
        return Relabeled(self.examples.to(device), self.targets.to(device))
