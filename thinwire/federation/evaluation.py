"""The averaged model, and evaluations by clients in the record of a round.

The averaged model is an exponential moving average of the weights of all versions (Polyak and Ruppert's averaging):

    avg_t = m avg_{t-1} + (1 - m) w_t        m = min(decay, 1 - 1 / t)

w_t is the model of version t; version 0, the initial weights, does not count. The average of one version is that
version, that of the first 1 / (1 - decay) versions is their plain mean, and later ones weigh versions by
(1 - decay) decay^age. It costs no bytes, because the server knows every version.

Evaluations by clients, each on its own validation examples:

    client_accuracy, client_loss    mean over clients, each counted alike
    clients_eval                    the accuracy over clients: count, mean, worst tenth, quantiles; metrics as above

Without a test set, the validation examples of all clients take its place:

    accuracy, test_loss, metrics    sum of n_i x_i / sum of n_i over clients, n_i: validation examples of client i

A metric is undefined for some clients, for example where a class is missing; its mean is over the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul

import torch
from torch import Tensor

from thinwire.core.tree import Tree
from thinwire.federation.job import RoundRecord
from thinwire.metrics.base import Metric, ModelMetric, SumMetric
from thinwire.metrics.clients import summarize
from thinwire.protocol.bounds import EXAMPLES_LIMIT, LOSS_LIMIT, Recent, factors, reference
from thinwire.protocol.round import Reply
from thinwire.training.evaluation import Evaluation


def averaged(average: Mapping[str, Tensor], newest: Mapping[str, Tensor], version: int, decay: float) -> Tree:
    """The average after a version.

    Args:
        average: the average before it; not used for version 1.
        newest: the weights and floating-point buffers of the version.
        version: its number, from 1.
        decay: the largest weight of the average before it.

    Sums are float32 at least: an average of 16-bit weights would hardly move in 16 bits.

    >>> one, two, three = ({"w": torch.tensor([x])} for x in (1.0, 2.0, 6.0))
    >>> mean = averaged(averaged(averaged({}, one, 1, 0.9), two, 2, 0.9), three, 3, 0.9)
    >>> mean["w"].item(), averaged(averaged({}, one, 1, 0.0), two, 2, 0.0)["w"].item()
    (3.0, 2.0)
    """
    wide = {name: block.to(torch.promote_types(block.dtype, torch.float32)) for name, block in newest.items()}
    if version == 1:
        return {name: block.clone() for name, block in wide.items()}  # a copy: the version may reuse its memory
    share = max(1 - decay, 1 / version)
    return dict(
        zip(wide, torch._foreach_lerp([average[name] for name in wide], list(wide.values()), share), strict=True)
    )


def with_client_accuracies(record: RoundRecord, values: Sequence[float]) -> RoundRecord:
    """A record with the distribution of the clients' accuracies: mean, worst tenth, quantiles."""
    if not values:
        return record
    return record._replace(client_accuracy=sum(values) / len(values), clients_eval=summarize(values))


def with_client_evaluations(
    record: RoundRecord, found: Sequence[Evaluation], weights: Sequence[float] | None
) -> RoundRecord:
    """A record with the evaluations of clients.

    Args:
        record: the record of the round.
        found: one evaluation of each client.
        weights: how much each counts where there is no test set; None if there is one.

    >>> record = RoundRecord(1, 0.5, None, None, 0, 0, 0, 2, 0.1)
    >>> found = [Evaluation(1.0, 0.5, {"f1": 0.4}, 30), Evaluation(2.0, 0.9, {}, 10)]
    >>> record = with_client_evaluations(record, found, [30.0, 10.0])
    >>> record.accuracy, record.test_loss, record.metrics, record.client_accuracy, record.clients_eval["f1"]
    (0.6, 1.25, {'f1': 0.4}, 0.7, 0.4)
    """
    if not found:
        return record
    record = record._replace(client_loss=math.fsum(one.loss for one in found) / len(found))
    record = with_client_accuracies(record, [one.accuracy for one in found if one.accuracy is not None])
    names = dict.fromkeys(name for one in found for name in one.metrics)

    def means(weights: Sequence[float]) -> dict[str, float]:
        values = {name: _mean([one.metrics.get(name) for one in found], weights) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    if alike := means([1.0] * len(found)):
        record = record._replace(clients_eval={**(record.clients_eval or {}), **alike})
    if weights is None:
        return record
    return record._replace(
        accuracy=_mean([one.accuracy for one in found], weights),
        test_loss=_mean([one.loss for one in found], weights),
        metrics=means(weights),
    )


def as_numbers(found: Evaluation) -> dict[str, float]:
    """An evaluation as the values of `RoundRecord.sites_eval`, without those that are not defined."""
    numbers = {"examples": found.examples, "accuracy": found.accuracy, "loss": found.loss, **found.metrics}
    return {name: one for name, one in numbers.items() if one is not None and math.isfinite(one)}


def where_defined(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics that are NaN, not an error, where a function of (outputs, targets) fails, as AUC does for one class.

    >>> import torch
    >>> def fails(outputs, targets):
    ...     raise ValueError("only one class")
    >>> where_defined({"auc": fails})["auc"](torch.zeros(1), torch.zeros(1))
    nan
    """
    return {name: one if isinstance(one, SumMetric | ModelMetric) else _or_nan(one) for name, one in metrics.items()}


def _or_nan(metric: Metric) -> Callable[[Tensor, Tensor], float]:
    def tried(outputs: Tensor, targets: Tensor) -> float:
        try:
            return metric(outputs, targets)
        except (ValueError, ZeroDivisionError, IndexError, RuntimeError):
            return math.nan

    return tried


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted mean of the values that are known and finite; None if none is."""
    pairs = [(x, w) for x, w in zip(values, weights, strict=True) if x is not None and math.isfinite(x)]
    total = math.fsum(w for _, w in pairs)
    return math.fsum(x * w for x, w in pairs) / total if total else None


def training_loss(
    replies: Mapping[int, Reply], recent: Recent, sizes: Mapping[int, int], limited: bool = True
) -> tuple[float, dict[int, str], dict[str, float]]:
    """The mean loss over all examples, with both bounded as uploads are; the clients that were bounded, with reasons;
    and the medians of both.

    Args:
        replies: the replies that were used.
        recent: the latest rounds.
        sizes: the number of examples of the clients of which it is known.
        limited: whether they are bounded.
    """
    losses, weights, medians = bounded([*replies.values()], recent, [sizes.get(i, 0) for i in replies])
    why = {
        client: f"it reports a loss of {one.loss:.3g} over {one.examples:.3g} examples, far above the median"
        for (client, one), *found in zip(replies.items(), losses, weights, strict=True)
        if found != [one.loss, one.examples]
    }
    if not limited:
        losses, weights, why = [one.loss for one in replies.values()], [one.examples for one in replies.values()], {}
    return sum(map(mul, losses, weights)) / sum(weights), why, medians


def bounded(
    reports: Sequence[Reply | Evaluation], recent: Recent, sizes: Sequence[int]
) -> tuple[list[float], list[float], dict[str, float]]:
    """The losses and the numbers of examples of some reports, those far above the median scaled down; the medians.

    Args:
        reports: those of several clients.
        recent: the latest rounds.
        sizes: the number of examples of each client; 0 where it is not known.
    """
    losses, examples = [abs(one.loss) for one in reports], [float(one.examples) for one in reports]
    medians = {"loss": reference(losses, recent.of("loss")), "examples": reference(examples, recent.of("examples"))}
    usual = medians["loss"]
    if 2 * (most := max(sizes)) > sum(sizes) and all(sizes):  # no client can claim examples: the median example
        usual = max(usual, losses[sizes.index(most)])
    by_loss = factors(losses, LOSS_LIMIT * usual)
    by_count = factors(examples, EXAMPLES_LIMIT * medians["examples"])
    counts = map(mul, examples, by_count)
    known = [min(one, size) if size else count for one, count, size in zip(examples, counts, sizes, strict=True)]
    return [one.loss * by for one, by in zip(reports, by_loss, strict=True)], known, medians
