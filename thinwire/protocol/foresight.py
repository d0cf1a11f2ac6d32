"""What a round will come to, before its messages are made: a GPU then need not wait for them.

A client's numbers that are sent as they are arrive as they are, so the sender's device can tell what the server will
make of them, and begin to train the next cohort while the host packs, checks and unpacks the messages of this one. The
server still goes by the messages alone. What was foreseen counts only if it is the same, bit for bit; if not, what was
trained from it is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from thinwire.aggregators.base import WeightedMean
from thinwire.codecs.base import Raw
from thinwire.core.tree import Tree, add, cut, flatten, grand_total, same, scale, weighted_mean
from thinwire.masks.masks import NoMask
from thinwire.optimizers.corrections import FedProx, NoCorrection
from thinwire.privacy.base import NoPrivacy
from thinwire.protocol.fields import heard_weight
from thinwire.protocol.state import Contract, Public, ServerState
from thinwire.schedules.base import AllBlocks, Plan
from thinwire.sketches.base import Identity


class Foreseen(NamedTuple):
    """What one round adds, and where it leads."""

    step: Tensor  # the averaged change of all coordinates, as one vector; on the CPU once it was fetched
    coords: Tree  # the next public coordinates, on the device
    total: Tensor  # the sum of these: finite only if all are

    def confirmed(self, code: Tree) -> bool:
        """Whether the server's own step is this one, bit for bit."""
        return same({"": flatten(code)}, {"": self.step})


def foreseeable(contract: Contract, server: ServerState, plan: Plan) -> bool:
    """Whether the next version is a plain mean of plain numbers, and nobody remembers anything else."""
    method, version = contract.method, server.public.version
    plain: tuple[tuple[object, type], ...] = (
        *((codec, Raw) for codec in (*method.ups, method.down, method.merge_codec)),
        (method.sketch, Identity),
        (method.privacy, NoPrivacy),
        (method.mask, NoMask),
        (method.aggregator, WeightedMean),
        (method.schedule, AllBlocks),
    )
    return (
        all(type(part) is kind for part, kind in plain)
        and type(method.correction) in (NoCorrection, FedProx)
        and method.download == "incremental"
        and method.upload == "delta"
        and not (method.secure_aggregation or method.budget.tiers or method.next_stage)
        and not (server.opt or contract.buffers.blocks or contract.remembers)
        and plan.names == contract.coords.named
        and contract.window(version) == contract.window(version + 1)
    )


def foresee(
    contract: Contract, public: Public, clients: Sequence[int], samples: Sequence[int], codes: Tensor
) -> Foreseen:
    """What `close_round` will make of these clients' numbers, in the same order of the same operations.

    Args:
        contract: the contract, of a round that is foreseeable.
        public: the public state that they trained from.
        clients: their numbers.
        samples: how many examples each has.
        codes: what each says, one row a client.
    """
    method, names, shapes = contract.method, contract.coords.names, contract.coords.like
    order = sorted(range(len(clients)), key=lambda i: clients[i])
    weights = [heard_weight(method, samples[i]) for i in order]
    mean = cut(weighted_mean([{"": codes[i]} for i in order], weights)[""], names, shapes)
    # blocks in one vector: a handful of kernels, not some for each block
    now = cut(flatten(public.coords), names, shapes)
    change, _ = method.server_opt_at(public.version).update(scale(mean, -1.0), {}, now)
    coords = add(now, change)
    return Foreseen(flatten(change), coords, grand_total(coords))
