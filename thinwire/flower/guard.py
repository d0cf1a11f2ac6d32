"""Which reports and updates of clients are far from those of the others.

    bounds     uploads, losses and numbers of examples are compared with the medians of the latest rounds, too
               (`protocol/bounds.py`), so that a cohort of one client, or of mostly malicious ones, is bounded
    far off    the norm of a client's update is above 3 times the median of its round or of the latest rounds
    not fit    the median loss that the next cohort reports is above 3 times the median of the latest rounds, and above
               3 times that of each of the last three

A state that is not fit, after a round with clients far off, is given up: the run goes back to the state before that
round and leaves these clients out (`runs/retry.py`). Without such clients the run continues.
"""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.core.tree import Tree, flatten, norm, sub
from thinwire.protocol.bounds import FAR, WEIGHT_LIMIT, Recent, factors, reference
from thinwire.protocol.round import Reply


def far_off(norms: Mapping[int, float], recent: float) -> tuple[int, ...]:
    """The clients whose update is far longer than the median of the round, or than that of the latest rounds.

    >>> far_off({0: 1.0, 1: 1.2, 2: 9.0}, recent=0.0), far_off({0: 8.0}, recent=1.0)
    ((2,), (0,))
    """
    if not norms:
        return ()
    middle = reference(list(norms.values()))
    most = FAR * (min(middle, recent) if recent and middle else recent or middle)
    return tuple(client for client, size in sorted(norms.items()) if size > most > 0)


def training_loss(responses: Mapping[int, Reply], limit: float, recent: Recent) -> tuple[float, dict[int, str]]:
    """The mean loss over all examples, with both bounded as uploads are; and the clients that were, with reasons.

    Args:
        responses: the responses that were used.
        limit: the largest loss, in units of the median; 0 for no bound.
        recent: the latest rounds.
    """
    losses, examples = reported(responses)
    by_loss = factors(losses, limit, recent.of("loss")) if limit else [1.0] * len(losses)
    by_count = factors(examples, WEIGHT_LIMIT, recent.of("examples"))
    shares = [count * by for count, by in zip(examples, by_count, strict=True)]
    total = sum(one.loss * by * share for one, by, share in zip(responses.values(), by_loss, shares, strict=True))
    why = {
        client: f"it reports a loss of {one.loss:.3g} over {one.examples:.3g} examples, far above the median"
        for client, one, *by in zip(responses, responses.values(), by_loss, by_count, strict=True)
        if min(by) < 1
    }
    return total / sum(shares), why


def similarity(updates: Mapping[int, Tree], start: Tree) -> tuple[dict[int, float], dict[int, float]]:
    """The norm of each update, and its cosine to the mean, in which no update is longer than the median.

    >>> import torch
    >>> trees = {0: {"w": torch.ones(2)}, 1: {"w": torch.ones(2)}, 2: {"w": -1e6 * torch.ones(2)}}
    >>> similarity(trees, {})[1]
    {0: 1.0, 1: 1.0, 2: -1.0}
    """
    moved = {i: sub(tree, start) if start else tree for i, tree in updates.items() if tree}
    norms = {i: norm(tree) for i, tree in moved.items()}
    if not moved:
        return {}, {}
    longest = reference(list(norms.values()))
    parts = [flatten(tree) * (min(1.0, longest / norms[i]) if norms[i] else 0.0) for i, tree in moved.items()]
    total = sum(parts[1:], parts[0])
    length = float(total.norm())
    cosines = {
        i: round(float(flatten(tree) @ total) / (norms[i] * length), 4) if norms[i] * length else 0.0
        for i, tree in moved.items()
    }
    return norms, cosines


def reported(responses: Mapping[int, Reply]) -> tuple[list[float], list[float]]:
    """Losses and numbers of examples."""
    return [abs(one.loss) for one in responses.values()], [float(one.examples) for one in responses.values()]
