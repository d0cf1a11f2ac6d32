"""Which parts of a method cannot work together, with what to write instead.

How parts that cannot work together are found and refused: probes of a method, and one sentence for each row.

What cannot work with adapters that are stacked: FedEx-LoRA and FLoRA.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

import torch

from thinwire.core.tree import Spec, Tree
from thinwire.errors import IncompatibleParts
from thinwire.protocol.method import Method


def check_method(method: Method, weights: Spec) -> None:
    """Raise IncompatibleParts, with what to write instead, if the parts of a method cannot work on this model."""
    method.space.check(weights)
    _check_merge(method)
    _check_download(method)
    _check_upload(method)
    if method.mask.active:
        _check_mask(method)
    if method.next_stage is not None:
        _check_stages(method)
    if method.asynchronous.active:
        _check_asynchronous(method)
    if method.opt_owner == "place":
        _check_places(method)
    _check_aggregator(method)
    if method.space.stacking is not None:
        _check_stacking(method)
    _check_lr_schedules(method)
    _check_sketch(method)
    if method.client_opt.forward_only and method.penalty.active:
        raise IncompatibleParts(
            f"{method.penalty!r} needs the gradient of the loss, but {method.client_opt!r} runs no backward pass. "
            "Write penalty = 'none', or client_opt = 'sgd'"
        )
    if method.space.reparametrized and has_state(method):
        raise IncompatibleParts(
            f"{method.correction!r} keeps a state of the coordinates, but with {method.space!r} clients train other "
            "values, which stand for them. Write correction = 'none', or use one without state, such as 'fedprox'"
        )


def _rescales(method: Method) -> bool:
    """Whether the correction multiplies updates by a factor."""
    c = method.correction
    _, report = c.finish(PROBE, 2, 1.0, c.init_client(PROBE), c.init_shared(PROBE))
    return c.factor(report) != 1.0


def _check_merge(method: Method) -> None:
    """A merge codec needs a space that merges; spaces that merge need incremental downloads and no correction state."""
    space, codec = method.space, method.merge_codec
    if not codec.exact and not space.redraw_every:
        raise IncompatibleParts(
            f"merge_codec = {codec!r} is used when a basis is redrawn, but {space!r} never redraws it. "
            "Write merge_codec = 'raw', or redraw_every = 10"
        )
    if not codec.exact and codec.init(Spec.of(PROBE)):
        raise IncompatibleParts(
            f"merge_codec = {codec!r} keeps a state between messages, but every window ends once. "
            "Use a codec without state"
        )
    if space.redraw_every and method.download == "full":
        raise IncompatibleParts(
            f"{space!r} merges its coordinates into the base, which download = 'full' does not send. "
            "Write download = 'incremental', or keep the basis (redraw_every = 0)"
        )
    if space.redraw_every and has_state(method):
        raise IncompatibleParts(
            f"{method.correction!r} keeps a state of the coordinates between rounds, but {space!r} redraws them. "
            "Write redraw_every = 0, or use a correction without state"
        )


def _check_download(method: Method) -> None:
    """Incremental downloads are the same for all clients; full ones have no codec state."""
    if method.download == "incremental" and any(down != method.down for down in method.downs):
        raise IncompatibleParts(
            "tiers of the budget have different download codecs, but with download = 'incremental' all clients replay "
            "the same entries. Write download = 'full', or remove down from the tiers"
        )
    if method.download == "full" and (odd := [down for down in method.downs if down.init(Spec.of(PROBE))]):
        raise IncompatibleParts(
            f"{odd[0]!r} keeps a state between messages, but with download = 'full' every message is complete. "
            "Write download = 'incremental', or use a download codec without state"
        )


def _check_upload(method: Method) -> None:
    """Parts that scale or clip updates, or code them, need updates."""
    if method.upload == "delta":
        return
    if _rescales(method):
        raise IncompatibleParts(
            f"{method.correction!r} scales updates, but with upload = 'weights' clients send none. "
            "Write upload = 'delta'"
        )
    if method.aggregator.clips:
        raise IncompatibleParts(
            f"{method.aggregator!r} clips updates, but with upload = 'weights' clients send none. "
            "Write upload = 'delta'"
        )
    if not method.sketch.is_identity:
        raise IncompatibleParts(
            f"{method.sketch!r} codes updates, but with upload = 'weights' clients send none. Write upload = 'delta'"
        )


def _check_aggregator(method: Method) -> None:
    """Secure aggregation and differential privacy are defined for the weighted mean."""
    if method.aggregator.is_weighted_mean:
        return
    if method.secure_aggregation:
        raise IncompatibleParts(
            f"secure_aggregation = true gives the server only a sum, but {method.aggregator!r} needs each upload. "
            "Write aggregator = 'weighted', or secure_aggregation = false"
        )
    if method.privacy.active:
        raise IncompatibleParts(
            f"{method.privacy!r} is defined for the weighted mean, and its guarantee under {method.aggregator!r} is "
            "not known. Write aggregator = 'weighted', or privacy = 'none'"
        )


def _check_lr_schedules(method: Method) -> None:
    """A learning-rate schedule needs an optimizer with a setting `lr`."""
    pairs = ((method.client_opt, method.lr_schedule), (method.server_opt, method.server_lr_schedule))
    for opt, schedule in pairs:
        if not schedule.constant and not (is_dataclass(opt) and any(f.name == "lr" for f in fields(opt))):
            raise IncompatibleParts(
                f"{schedule!r} changes lr from round to round, but {opt!r} has no setting of that name. "
                "Write lr_schedule = 'constant'"
            )


def _check_sketch(method: Method) -> None:
    """With a sketch the server sees codes, not coordinates."""
    if method.sketch.is_identity:
        return
    if _depends_on_coordinates(method):
        raise IncompatibleParts(
            f"the step of {method.server_opt!r} depends on the coordinates, but under {method.sketch!r} the server "
            "moves codes. Write weight_decay = 0 for the server, server_opt = 'sgd', or use the identity sketch"
        )
    if method.correction.init_server(PROBE):
        raise IncompatibleParts(
            f"{method.correction!r} keeps a server state of the coordinates, but under {method.sketch!r} the server "
            "has codes only. Use the identity sketch, or a correction without server state"
        )


def _depends_on_coordinates(method: Method) -> bool:
    """Whether the step of the server optimizer depends on the coordinates, given the same gradient."""
    grads: Tree = {"probe": torch.ones(1)}
    at = [{"probe": torch.full((1,), x)} for x in (0.0, 1.0)]
    _, state = method.server_opt.update(grads, method.server_opt.init(grads), at[0])
    here, there = (method.server_opt.update(grads, state, coords)[0] for coords in at)
    return not torch.equal(here["probe"], there["probe"])


def _check_mask(method: Method) -> None:
    """A mask needs coordinates that are kept, that the server moves itself, and that both ends know."""
    zeros_arrive = method.down.keeps_zeros or method.download == "full"
    refuse(
        f"{method.mask!r} masks coordinates, but with {{part!s}} {{why}}. Write {{instead}}",
        (
            (not method.sketch.is_identity, method.sketch, "the server moves codes", "the identity sketch"),
            (
                method.upload == "weights",
                "upload = 'weights'",
                "masked values would be averaged as zero",
                "upload = 'delta'",
            ),
            (method.space.redraw_every, method.space, "coordinates are initialized again", "redraw_every = 0"),
            (
                not method.schedule.resamples(1),
                method.schedule,
                "blocks are not sent in every round",
                "schedule = 'all-blocks'",
            ),
            (
                method.mask.prunes and not zeros_arrive,
                f"down = {method.down!r} and download = 'incremental'",
                "zeros are not decoded as zeros",
                "down = 'raw' or download = 'full'",
            ),
        ),
    )


def _check_stages(method: Method) -> None:
    """The coordinates of the first stage end with it: no state may depend on them, and all of them are sent."""
    later = method.later
    merges = "coordinates are merged into the base"
    refuse(
        "next_stage replaces the coordinates of the first stage, but with {part!s} that cannot work: {why}. "
        "Write {instead}",
        (
            (
                method.download == "incremental",
                "download = 'incremental'",
                "clients replay what was added to them",
                "download = 'full'",
            ),
            (method.space.redraw_every, method.space, merges, "redraw_every = 0"),
            (later.space.redraw_every, later.space, merges, "redraw_every = 0"),
            (has_state(method), method.correction, "it keeps a state of them", "correction = 'none'"),
            (
                not later.space.starts_from_weights,
                later.space,
                "it cannot start from given weights",
                "space = 'lora' with freeze_a = false",
            ),
            (later.mask.fixed, later.mask, "clients do not know the values that it fixes", "mask = 'none'"),
        ),
    )


def _check_asynchronous(method: Method) -> None:
    """An upload is used some versions after the one that it is based on: what it says must still be valid."""
    refuse(
        "asynchronous rounds use uploads of older versions, but with {part!s} {why}. Write {instead}",
        (
            (
                method.secure_aggregation,
                "secure_aggregation = true",
                "masks cancel only in a sum of one round",
                "secure_aggregation = false, or asynchronous.concurrency = 0",
            ),
            (
                method.privacy.active,
                method.privacy,
                "epsilon is not known: who takes part depends on speed",
                "privacy = 'none', or asynchronous.concurrency = 0",
            ),
            (method.upload == "weights", "upload = 'weights'", "they replace newer weights", "upload = 'delta'"),
            (
                method.space.redraw_every,
                method.space,
                "coordinates of an older basis cannot be added to new ones",
                "redraw_every = 0",
            ),
            (
                not method.sketch.is_identity,
                method.sketch,
                "codes of two versions cannot be averaged",
                "the identity sketch",
            ),
            (
                not method.schedule.resamples(1),
                method.schedule,
                "a cohort stays together for several rounds",
                "schedule = 'all-blocks'",
            ),
            (has_state(method), method.correction, "its states belong to one version", "correction = 'none'"),
            (
                method.mask.active and not method.mask.fixed,
                method.mask,
                "each version has another mask",
                "mask = 'none', or a mask that is fixed",
            ),
            (method.next_stage is not None, "next_stage", "the coordinates are replaced", "no next_stage"),
        ),
    )


def _check_places(method: Method) -> None:
    """A client goes on with the optimizer state of another: it must mean the same to both."""
    refuse(
        "opt_owner = 'place' hands optimizer states to the next cohort, but with {part!s} {why}. Write {instead}",
        (
            (
                method.space.redraw_every,
                method.space,
                "they belong to a basis",
                "redraw_every = 0, or opt_owner = 'client'",
            ),
            (
                method.next_stage is not None,
                "next_stage",
                "they belong to the coordinates of a stage",
                "no next_stage, or opt_owner = 'client'",
            ),
            (
                method.asynchronous.active,
                "asynchronous rounds",
                "clients have no places in a cohort",
                "asynchronous.concurrency = 0, or opt_owner = 'client'",
            ),
        ),
    )


PROBE: Tree = {"probe": torch.zeros(1)}


def has_state(method: Method) -> bool:
    """Whether the correction keeps a state anywhere."""
    c = method.correction
    return bool(c.init_client(PROBE) or c.init_shared(PROBE) or c.init_server(PROBE))


def refuse(sentence: str, rows: Iterable[tuple[object, object, str, str]]) -> None:
    """Raise IncompatibleParts for the first row that applies: (applies, part, why, what to write instead)."""
    for applies, part, why, instead in rows:
        if applies:
            raise IncompatibleParts(sentence.format(part=part, why=why, instead=instead))


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
