"""EvoFed and Ferret: updates are sent as values of a shared random population."""

from __future__ import annotations

from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.optimizers import SGD
from thinwire.protocol.method import Method
from thinwire.sketches import EvoFed


@register("method", "evofed", paper="Rahimi et al., NeurIPS 2023")
@on("mnist", population=1024)
@on("cifar10", population=32, sigma=0.42, partitions=200, server_lr=0.0467)
# The published rate suits longer runs; of 0.0427, 0.1, 0.3, 1, 2 and 4 this one had the best accuracy in 60 rounds.
@on("digits", server_lr=4.0)
def evofed(population: int = 128, sigma: float = 0.35, partitions: int = 1, server_lr: float = 0.0427) -> Method:
    """EvoFed: clients upload the fitness of shared random perturbations, the distance to their trained weights.

        F_j = rank(-|w + sigma z_j - w_i|)          w <- w + server_lr / (n sigma) sum_j mean(F)_j z_j

    The perturbations z_j are drawn from the shared seed, in pairs z and -z.

    Args:
        population: n, the number of perturbations and of uploaded values per partition; even.
        sigma: standard deviation of the perturbations.
        partitions: parts of the model, each with a population of its own.
        server_lr: learning rate of the server.

    Paper: EvoFed: Leveraging Evolutionary Strategies for Communication-Efficient Federated Learning (Rahimi et al.,
    NeurIPS 2023).

    >>> evofed(population=32).sketch.population
    32
    """
    sketch = EvoFed(population=population, sigma=sigma, partitions=partitions)
    return Method(sketch=sketch, server_opt=SGD(server_lr))


@register("method", "ferret", paper="Shu et al., ICML 2025")
@on("digits", server_lr=0.5)  # of three (docs/results/seeds-digits.md)
def ferret(population: int = 16, partitions: int = 16, server_lr: float = 1.0) -> Method:
    """Ferret: clients train by backward passes and upload their update projected on random directions, by blocks.

        c_j = z_j . delta          w <- w + server_lr * 2 / n sum_j mean(c)_j z_j          j = 1 .. n / 2, in each block

    `evofed` with squared distances and without ranks. The update is unbiased; its error is d / (blocks n / 2) times the
    length of delta squared, so a smaller learning rate of the server is needed where few values are sent.

    Args:
        population: n, twice the number of directions and of uploaded values of a block; even.
        partitions: blocks of the weights, of equal size.
        server_lr: learning rate of the server.

    Paper: Ferret: Federated Full-Parameter Tuning at Scale for Large Language Models (Shu et al., ICML 2025).

    >>> ferret(partitions=4).sketch.paired
    True
    """
    sketch = EvoFed(population, sigma=1.0, partitions=partitions, shaping="none", fitness="square", paired=True)
    return Method(sketch=sketch, server_opt=SGD(server_lr))
