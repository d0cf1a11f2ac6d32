"""Federated averaging and its limits: one gradient step a round, no communication, a private last layer."""

from __future__ import annotations

from thinwire.core.registry import register
from thinwire.protocol.method import Method
from thinwire.schedules import AllBlocks


@register("method", "fedavg", paper="McMahan et al., AISTATS 2017")
def fedavg() -> Method:
    """FedAvg: clients train the whole model, the server averages it, weighted by the number of examples.

        w <- w + sum_i (n_i / n) (w_i - w)          n_i: examples of client i,  n: of the cohort

    The learning rate is the task's. In Python: `fedavg().replace(client_opt=tw.SGD(0.3))`.

    Paper: Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., AISTATS 2017).

    >>> fedavg() == Method()
    True
    """
    return Method()


@register(
    "method",
    "fedsgd",
    paper="McMahan et al., AISTATS 2017",
    preset={"local": {"epochs": 1, "batch": 0, "steps": 1}},
)
def fedsgd() -> Method:
    """FedSGD: one full-batch gradient step a round, which equals centralized gradient descent.

        w <- w - lr sum_i (n_i / n) grad f_i(w)

    The method is FedAvg; the preset also sets `[local]`. With `tw.simulate`, pass `local=tw.Local(batch=0, steps=1)`.

    Paper: Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., AISTATS 2017).

    >>> fedsgd() == fedavg()
    True
    """
    return Method()


@register("method", "local", paper="compared with in Hyeon-Woo et al., ICLR 2022")
def local() -> Method:
    """Local training without communication: every client keeps its model; a baseline for personal models.

        w_i <- train(w_i)                           no upload, no average

    Test it with `task.validation_fraction`: accuracy is measured on each client's held-out examples.

    Paper: baseline of FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et
    al., ICLR 2022).

    >>> local().schedule.private
    ('*',)
    """
    return Method(schedule=AllBlocks(private=("*",)))


@register("method", "fedper", paper="Arivazhagan et al., 2019")
def fedper(private: tuple[str, ...] = ("head.*",)) -> Method:
    """FedPer: FedAvg of all layers except the last one, which stays on each client as a personal head.

        w_base <- sum_i (n_i / n) w_base,i          w_head,i is never sent

    Args:
        private: selectors of the parameters that stay on the client. The default expects a last layer named `head`.

    Paper: Federated Learning with Personalization Layers (Arivazhagan et al., 2019).

    >>> fedper(private=("fc2.*",)).schedule.private
    ('fc2.*',)
    """
    return Method(schedule=AllBlocks(private=private))
