"""What cannot work with aggregation of adapters by their products: FlexLoRA, FedEx-LoRA and FLoRA."""

from __future__ import annotations

import torch

from thinwire.core.spec import Spec
from thinwire.protocol.method import Method
from thinwire.protocol.refusals import PROBE, has_state, refuse


def check_exact(method: Method) -> None:
    """Raise IncompatibleParts for parts with which the mean of products would not be that of the clients."""
    if method.aggregator.of_values:
        _check_of_values(method)
    if method.space.stacking is not None:
        _check_stacking(method)


def _check_of_values(method: Method) -> None:
    """An aggregate of products of factors is right as it is, and a state of factors is worth nothing after it."""
    refuse(
        f"{method.aggregator!r} aggregates products of factors, but with {{part!s}} {{why}}. Write {{instead}}",
        (
            (
                method.space.counts_from_start,
                method.space,
                "A is stored as a change from its start",
                "from_start = false",
            ),
            (method.mask.active, method.mask, "the aggregate has values outside of it", "mask = 'none'"),
            (not method.sketch.is_identity, method.sketch, "clients send codes", "the identity sketch"),
            (
                not method.schedule.resamples(1),
                method.schedule,
                "A and B may be sent in different rounds",
                "schedule = 'all-blocks'",
            ),
            (has_state(method), method.correction, "a state of the old factors remains", "correction = 'none'"),
            (method.asynchronous.active, method.asynchronous, "uploads have other factors", "concurrency = 0"),
            (
                not _applies_updates(method),
                method.server_opt,
                "the server moves A and B by something else than the aggregate",
                "server_opt = 'sgd' with lr = 1.0 and no momentum",
            ),
        ),
    )


def _check_stacking(method: Method) -> None:
    """A stack needs the factors of each client, and has another size in every round."""
    refuse(
        f"{type(method.space).__name__} adds the adapters of all clients to the base, but with {{part!s}} {{why}}. "
        "Write {instead}",
        (
            (
                method.secure_aggregation,
                "secure_aggregation = true",
                "the server learns only a sum",
                "secure_aggregation = false, or the method fed-sb, whose sum is exact",
            ),
            (
                method.privacy.active,
                method.privacy,
                "each adapter would be broadcast without noise",
                "privacy = 'none', or the method ffa-lora or fed-sb",
            ),
            (
                not method.aggregator.is_weighted_mean,
                f"aggregator = {method.aggregator!r}",
                "factors are not averaged as they are stacked",
                "aggregator = 'weighted'",
            ),
            (not method.sketch.is_identity, method.sketch, "clients send codes", "the identity sketch"),
            (
                not method.merge_codec.exact,
                f"merge_codec = {method.merge_codec!r}",
                "what is merged is stacked, and encoded by down",
                "merge_codec = 'raw'",
            ),
            (
                bool(method.down.init(Spec.of(PROBE))),
                f"down = {method.down!r}",
                "a state is kept of blocks whose shapes change",
                "a download codec without state, such as 'raw'",
            ),
            (
                not _applies_updates(method),
                method.server_opt,
                "the server moves A and B by something else than the mean",
                "server_opt = 'sgd' with lr = 1.0 and no momentum",
            ),
        ),
    )


def _applies_updates(method: Method) -> bool:
    """Whether the step of the server is the aggregate itself, in every round."""
    opt, grads = method.server_opt, {"probe": -torch.ones(1)}
    step, _ = opt.update(grads, opt.init(grads), {"probe": torch.ones(1)})
    return method.server_lr_schedule.constant and not opt.init(grads) and torch.equal(step["probe"], -grads["probe"])
