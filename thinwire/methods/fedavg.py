"""Federated averaging and its limits: one gradient step a round, no communication, a private last layer.

`on`, the decorator for a method that has other arguments on a task.

A method is a function whose arguments all have defaults. `register` gives it a name, under which the command line,
experiment files and `+` expressions find it:

    @register("method", "mapo-paper", paper="MAPO: Reshape-then-factorize")
    @on("cifar10", k=1024, lr=0.003)
    def mapo_paper(k: int = 128, lr: float = 0.02) -> Method: ...

`mapo_paper()` is the method itself. `resolve("mapo-paper", on="cifar10")` uses `mapo_paper(k=1024, lr=0.003)`. Settings
outside of `Method` are stated in `register`: `register("method", "fedsgd", preset={"local": {"steps": 1}})`.

FedBuff: rounds that do not wait for slow clients.

FedOpt: FedAvg with an optimizer at the server. The negated mean update is its gradient.

FedAvg with corrected local steps: less client drift on non-IID data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from thinwire.aggregators import Uniform
from thinwire.core.registry import register
from thinwire.optimizers import SGD, Adagrad, Adam, FedDyn, FedNova, FedProx, Scaffold, Yogi
from thinwire.protocol.method import Asynchronous, Method
from thinwire.schedules import AllBlocks


@register("method", "fedavg", paper="McMahan et al., AISTATS 2017")
def fedavg() -> Method:
    """FedAvg: clients train the whole model, the server averages it, weighted by the number of examples.

        w <- w + sum_i (n_i / n) (w_i - w)          n_i: examples of client i,  n: of the cohort

    The learning rate is the task's. In Python: `fedavg().replace(client_opt=tw.optimizers.SGD(0.3))`.

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


T = TypeVar("T", bound=Callable[..., Method])
Arguments = Mapping[str, Any]


def on(*tasks: str, **arguments: Any) -> Callable[[T], T]:
    """Call the function with these arguments when its name is resolved on one of some tasks.

    Args:
        *tasks: names of task presets, for example `cifar10`.
        **arguments: arguments of the function; those that are not given keep their defaults.

    >>> @on("cifar10", phi=8)
    ... def example(phi: int = 4) -> Method:
    ...     return Method()
    >>> arguments_on_tasks(example)
    {'cifar10': {'phi': 8}}
    """

    def enter(make: T) -> T:
        inspect.signature(make).bind_partial(**arguments)  # a misspelled argument fails at import
        make.__dict__["on_tasks"] = {**dict.fromkeys(tasks, arguments), **arguments_on_tasks(make)}
        return make

    return enter


def passes_on(target: Callable[..., Any], *names: str) -> Callable[[T], T]:
    """Show in the signature of a function with `**options` what it passes on: these parameters of another one, or all.

    >>> @passes_on(fedavgm, "momentum")
    ... def example(lr: float = 0.1, **options: float) -> Method:
    ...     return fedavgm(**options)
    >>> list(inspect.signature(example).parameters)
    ['momentum', 'lr']
    """
    known = inspect.signature(target).parameters
    shown = [known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names or known]

    def enter(make: T) -> T:
        own = list(inspect.signature(make).parameters.values())[:-1]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        make.__dict__["__signature__"] = inspect.Signature([*shown, *own])
        return make

    return enter


def arguments_on_tasks(make: Callable[..., Method]) -> dict[str, Arguments]:
    """The arguments that `on` states, by task."""
    return dict(getattr(make, "on_tasks", {}))


@register("method", "fedbuff", paper="Nguyen et al., AISTATS 2022")
def fedbuff(concurrency: float = 2.0, exponent: float = 0.5, most_stale: int = 0) -> Method:
    """FedBuff: a version is made of the first uploads that arrive, also of clients with an older version.

        w <- w + sum_i (n_i / n) (1 + tau_i)^-exponent (update of client i)     over the uploads that came first

    with tau_i the number of versions since the one that client i trained from, n_i its examples and n those of all i.

    Args:
        concurrency: clients that train at the same time, in units of the cohort.
        exponent: how fast the weight of an update falls with its staleness.
        most_stale: the largest staleness of an upload that is used; 0 for any.

    Paper: Federated Learning with Buffered Asynchronous Aggregation (Nguyen et al., AISTATS 2022). There a client that
    is done is replaced at once; here its place is filled when the next version is there.

    >>> fedbuff(concurrency=3.0).asynchronous.clients(10, 100)
    30
    """
    return Method(asynchronous=Asynchronous(concurrency, exponent, most_stale))


@register("method", "fedavgm", paper="Hsu et al., 2019")
def fedavgm(server_lr: float = 0.2, momentum: float = 0.9) -> Method:
    """FedAvgM: FedAvg with momentum at the server.

        m <- momentum m + mean_i(w_i - w)           w <- w + server_lr m

    Args:
        server_lr: learning rate of the server. A small one keeps the client learning rate of the task usable.
        momentum: momentum of the server.

    Paper: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification (Hsu et al.,
    2019).

    >>> fedavgm(momentum=0.5).server_opt.momentum
    0.5
    """
    return Method(server_opt=SGD(server_lr, momentum=momentum))


@register("method", "fedadam", paper="Reddi et al., ICLR 2021")
def fedadam(server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3) -> Method:
    """FedAdam: FedAvg with Adam at the server, without bias correction.

        m <- beta1 m + (1 - beta1) D       v <- beta2 v + (1 - beta2) D^2       w <- w + server_lr m / (sqrt(v) + eps)

    with D = mean_i(w_i - w).

    Args:
        server_lr: learning rate of the server.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: the paper's tau, the degree of adaptivity.

    Paper: Adaptive Federated Optimization (Reddi et al., ICLR 2021).

    >>> fedadam(server_lr=0.03).server_opt.lr
    0.03
    """
    return Method(server_opt=Adam(server_lr, beta1=beta1, beta2=beta2, eps=eps, bias_correction=False))


@register("method", "fedyogi", paper="Reddi et al., ICLR 2021")
def fedyogi(server_lr: float = 0.01) -> Method:
    """FedYogi: FedAvg with Yogi at the server.

        v <- v - (1 - beta2) D^2 sign(v - D^2)      w <- w + server_lr m / (sqrt(v) + eps)

    Args:
        server_lr: learning rate of the server.

    Paper: Adaptive Federated Optimization (Reddi et al., ICLR 2021).

    >>> fedyogi().server_opt.lr
    0.01
    """
    return Method(server_opt=Yogi(server_lr))


@register("method", "fedadagrad", paper="Reddi et al., ICLR 2021")
def fedadagrad(server_lr: float = 0.1) -> Method:
    """FedAdagrad: FedAvg with Adagrad at the server.

        v <- v + D^2                                w <- w + server_lr D / (sqrt(v) + eps)

    Args:
        server_lr: learning rate of the server.

    Paper: Adaptive Federated Optimization (Reddi et al., ICLR 2021).

    >>> fedadagrad().server_opt.lr
    0.1
    """
    return Method(server_opt=Adagrad(server_lr))


@register("method", "fedprox", paper="Li et al., MLSys 2020")
def fedprox(mu: float = 0.1) -> Method:
    """FedProx: FedAvg with a proximal term that keeps local training close to the received weights.

        client:  min_w  f_i(w) + (mu / 2) |w - w_received|^2

    Args:
        mu: strength of the proximal term; 0 is FedAvg.

    Paper: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020).

    >>> fedprox(mu=0.01).correction
    FedProx(mu=0.01)
    """
    return Method(correction=FedProx(mu))


@register("method", "scaffold", paper="Karimireddy et al., ICML 2020")
def scaffold() -> Method:
    """SCAFFOLD: FedAvg with control variates that remove client drift; messages are twice as long.

        g <- g - c_i + c          c_i <- c_i - c - (w_i - w) / (K lr)          c <- c + (m / N) mean(c_i' - c_i)

    Clients have equal weights, so that c is exactly the mean of all c_i. K is the number of local steps.

    Paper: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., ICML 2020).

    >>> scaffold().client_weight
    Uniform()
    """
    return Method(correction=Scaffold(), client_weight=Uniform())


@register("method", "feddyn", paper="Acar et al., ICLR 2021")
def feddyn(alpha: float = 0.1) -> Method:
    """FedDyn: FedAvg with a dynamic regularizer that aligns each client's optimum with the global one.

        client:  g <- g - g_i + alpha (w - w_received)          g_i <- g_i - alpha (w_i - w_received)
        server:  h <- h - alpha (m / N) mean(D_i)               w <- w + mean(D_i) - h / alpha

    Clients have equal weights, so that h is exactly the mean of all g_i. h adds up all updates, so one client must not
    send much longer ones than the others: `norm_bound` is 1.5.

    Args:
        alpha: strength of the regularizer.

    Paper: Federated Learning Based on Dynamic Regularization (Acar et al., ICLR 2021).

    >>> feddyn(alpha=0.01).correction
    FedDyn(alpha=0.01)
    """
    return Method(correction=FedDyn(alpha), client_weight=Uniform(), norm_bound=1.5)


@register("method", "fednova", paper="Wang et al., NeurIPS 2020")
def fednova(momentum: float = 0.0) -> Method:
    """FedNova: FedAvg of updates normalized by the number of local steps of each client.

        w <- w + (sum_i p_i tau_i) (sum_i p_i D_i / tau_i)          tau_i: local steps of client i

    Args:
        momentum: momentum of the clients' SGD, which changes tau_i; 0 for plain SGD.

    Paper: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization (Wang et al., NeurIPS
    2020).

    >>> fednova().correction
    FedNova(momentum=0.0)
    """
    return Method(correction=FedNova(momentum))
