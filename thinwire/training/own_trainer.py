"""Local training by a function of the user: a loop of torch, a `transformers.Trainer`, or anything that trains modules.

    fit(model, records) -> model

`model` is a module whose trainable parameters are the coordinates of the method's space (`trainable_module`), `records`
has the client's examples (`Records`). What comes back, the model or its state dict, is checked, and
everything after it is as ever: schedules, masks, sketches, privacy, codecs. Clients are trained one after another.

    fit(model, records, lr, seed)      further parameters are filled by name, those that it has
    return model, 0.5                  the model and its loss; without one, that on the client's first batch counts
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from thinwire.core.reference import failure, load_reference, short_name, source_file
from thinwire.core.text import visible
from thinwire.core.tree import Tree, to_device
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, ThinwireError
from thinwire.metrics.classification import IGNORED
from thinwire.optimizers.base import Correction
from thinwire.optimizers.penalties import Penalty
from thinwire.spaces.base import Space
from thinwire.training.backends import stack_outcomes
from thinwire.training.functional import Functional
from thinwire.training.inputs import TrainingInputs, TrainingOutcome, Workload
from thinwire.training.step import of_client, seeded

FILLED = ("lr", "seed")  # parameters of `fit` that are filled


@dataclass(frozen=True, eq=False)
class OwnTrainer:
    """Trains clients one after another by a function of the user.

    Args:
        fit: the function.
        label: its name for readers.
        model: the model and its loss.
        filled: its parameters that are filled.
    """

    fit: Callable[..., Any]
    label: str
    model: Functional
    filled: tuple[str, ...]

    @classmethod
    def of(cls, trainer: str | Callable[..., Any], model: Functional) -> OwnTrainer:
        """The trainer of a function or of a reference to one.

        Raises:
            ConfigError: if it is no function that can be called with a model and records.
        """
        fit = load_reference(trainer) if isinstance(trainer, str) else trainer
        label = short_name(trainer) if isinstance(trainer, str) else getattr(fit, "__name__", type(fit).__name__)
        if not callable(fit) or isinstance(fit, nn.Module):
            raise ConfigError(f"{label} is of type {type(fit).__name__}; a trainer is a function fit(model, records)")
        try:
            signature = inspect.signature(fit)
            filled = tuple(name for name in list(signature.parameters)[2:] if name in FILLED)
            signature.bind(None, None, **dict.fromkeys(filled))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{label} cannot be called: {error}; a trainer is a function fit(model, records), with parameters "
                f"{', '.join(FILLED)} if it needs them"
            ) from error
        return cls(fit, label, model, filled)

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train the clients in order."""
        return stack_outcomes([self._train_one(inputs, i) for i in range(len(inputs.work.samples))])

    def _train_one(self, inputs: TrainingInputs, i: int) -> TrainingOutcome:
        """Train client i; the trees of the outcome have no client axis."""
        one = of_client(inputs, i)
        space = one.space.merged()
        given = trainable_module(self.model.module, space, one.base, one.basis, one.buffers, one.start)
        lr = float(one.optimizer.lr) * (1.0 if one.lr_factor is None else float(one.lr_factor))
        values = {"lr": lr, "seed": one.work.seed}
        with torch.enable_grad(), seeded(one.work), _seeded_libraries(one.work.seed):
            try:
                answer = self.fit(given.module, Records(one.work), **{name: values[name] for name in self.filled})
            except ThinwireError:
                raise
            except Exception as error:
                raise failure(error, source_file(self.fit)) from error
            coords, buffers, loss = read_returned(answer, given, one.start, one.buffers, self.label)
            for name, may_change in one.trainable.items():
                coords[name] = torch.where(may_change, coords[name], one.start[name])
            loss = self._loss(one, space, coords, buffers) if loss is None else loss
        if not math.isfinite(loss):
            raise Diverged(f"{self.label} returned a model with a loss of {loss}; try a smaller learning rate")
        return TrainingOutcome(coords, buffers, torch.tensor([loss]), {})

    @torch.no_grad()
    def _loss(self, one: TrainingInputs, space: Space, coords: Tree, buffers: Tree) -> float:
        """The loss of the trained model on the client's first batch."""
        x, y = one.work.gather(one.work.index[0, 0, : int(one.work.rows[0, 0])])
        value, _ = self.model.loss(space.expand(one.base, one.basis, coords), buffers, x, y, None)
        return float(value)


def check_own_trainer(correction: Correction, penalty: Penalty) -> None:
    """Raise IncompatibleParts for parts that need every local step, which a trainer of one's own takes itself.

    >>> from thinwire.optimizers import FedProx, NoPenalty
    >>> check_own_trainer(FedProx(0.1), NoPenalty())
    Traceback (most recent call last):
    thinwire.errors.IncompatibleParts: FedProx(mu=0.1) corrects each local step, which local.trainer takes itself; ...
    """
    if correction.active:
        raise IncompatibleParts(
            f"{correction!r} corrects each local step, which local.trainer takes itself; write correction = 'none'"
        )
    if penalty.active:
        raise IncompatibleParts(
            f"{penalty!r} is added to the loss of each local step, which local.trainer takes itself; write penalty = "
            "'none', and add it to the loss there"
        )


@contextmanager
def _seeded_libraries(seed: int) -> Iterator[None]:
    """Seed the generators of Python and numpy too; the caller's states are restored."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - what trainers draw from
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


LABELS = "labels"  # the name that models of `transformers` have for targets


class Records(Dataset[Any]):
    """The examples of one client: a torch `Dataset`, and the batches that this round would train on.

        records[i]          (inputs, target); where inputs are named, a dictionary of them and `labels`
        records.inputs      the inputs of all examples, and records.targets
        records.batches()   pairs (inputs, targets), by `local.epochs`, `local.batch` and `local.steps`

    Rows of tokens (`TokenRows`) have labels as `transformers` counts them: the token itself, not the next one, and -100
    where nothing is learned.

    Args:
        work: the batches and examples of the client.

    >>> import numpy as np
    >>> from thinwire.core.key import Key
    >>> from thinwire.data.examples import Arrays
    >>> from thinwire.training.batches import Local, plan_batches
    >>> pool = Arrays(torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> plan = plan_batches([3], [Key(0)], Local(batch=2))
    >>> index, own = torch.from_numpy(plan.index), (np.arange(3),)
    >>> work = Workload(index, plan.rows, (3,), (0,), Key(0), 0, pool.gather, examples=own)
    >>> records = Records(work)
    >>> len(records), [target.item() for _, target in records], [len(x) for x, _ in records.batches()]
    (3, [0, 1, 0], [2, 1])
    """

    def __init__(self, work: Workload) -> None:
        self._work, self._index = work, torch.from_numpy(work.examples[0]).to(work.index.device)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Any:
        if not -len(self) <= i < len(self):
            raise IndexError(f"record {i} of {len(self)}")
        inputs, target = self._work.gather(self._index[i])
        return _named(inputs, target) if isinstance(inputs, dict) else (inputs, target)

    @property
    def inputs(self) -> Any:
        """The inputs of all examples."""
        return self._work.gather(self._index)[0]

    @property
    def targets(self) -> Tensor:
        """The targets of all examples."""
        return self._work.gather(self._index)[1]

    def batches(self) -> Iterator[tuple[Any, Tensor]]:
        """The batches of this round, in the order that our own steps would take them."""
        for step, rows in enumerate(self._work.rows[0].tolist()):
            if rows:
                yield self._work.gather(self._work.index[0, step, :rows])


def _named(inputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    """Inputs and labels of one example under the names of `transformers`."""
    if "label_positions" not in inputs:
        return {**inputs, LABELS: target}
    labels, known = torch.full_like(inputs["input_ids"], IGNORED), target != IGNORED
    labels[inputs["label_positions"][known] + 1] = target[known]  # the model itself looks one token ahead
    return {**{name: block for name, block in inputs.items() if name != "label_positions"}, LABELS: labels}


Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters


@dataclass(frozen=True, eq=False)
class TrainableModule:
    """A copy of a module with coordinates as its parameters.

    Args:
        module: the copy.
        names: by coordinate, the name of its parameter.
        fixed: parameters that the method does not train, by name: their values.
        buffers: names of the buffers that are sent.
    """

    module: nn.Module
    names: dict[str, str]
    fixed: Tree
    buffers: tuple[str, ...]


def trainable_module(
    module: nn.Module, space: Space, base: Tree, basis: Tree, buffers: Tree, coords: Tree
) -> TrainableModule:
    """A copy of a module whose trainable parameters are the coordinates of a space.

        full     the weights themselves
        lora     A and B: parameters `fc.weight/a`, `fc.weight/b`; the matrix W = W0 + s B A in each forward pass
        mapo     b: the parameter `model/b`

    The state dict has the names of the coordinates, so that what a trainer returns is read by name. Weights that do not
    depend on coordinates are parameters without a gradient, as in peft.

    Args:
        module: the model; it stays unchanged.
        space: maps coordinates to weights.
        base: base weights of the space.
        basis: its basis.
        buffers: values of the buffers.
        coords: the coordinates of one client.

    >>> from thinwire.core.key import Key
    >>> from thinwire.spaces import LoRA
    >>> model, space = nn.Sequential(nn.Linear(2, 3)), LoRA(rank=1, target_modules=("0.weight",))
    >>> base = {name: p.detach() for name, p in model.named_parameters()}
    >>> made = trainable_module(model, space, base, {}, {}, space.init(base, {}, Key(0)))
    >>> [name for name, p in made.module.named_parameters() if p.requires_grad]
    ['0.weight/a', '0.weight/b']
    >>> torch.equal(made.module(torch.ones(1, 2)), model(torch.ones(1, 2)))
    True
    """
    own = copy.deepcopy(module).train()
    places = _places(own)
    leaves = {name: nn.Parameter(block.detach().clone()) for name, block in coords.items()}
    with torch.enable_grad():
        weights = space.expand(base, basis, dict[str, Tensor](leaves))
    if weights.keys() != base.keys():
        raise ConfigError(f"a trainer of one's own cannot train {space!r}: its weights are no tensors of the model")
    derived, names = [], {}
    for name, weight in weights.items():
        if weight.requires_grad and weight is not leaves.get(name):
            derived.append(name)
            for owner, leaf in places[name]:
                del owner._parameters[leaf]
            continue
        parameter = leaves.get(name) if weight.requires_grad else nn.Parameter(weight.detach().clone(), False)
        if weight.requires_grad:
            names[name] = name
        for owner, leaf in places[name]:
            owner._parameters[leaf] = parameter
    where: dict[str, Place] = {}
    for name in [name for name in leaves if name not in names]:  # in one order: optimizers number parameters
        names[name] = f"{name}/value" if name in derived else name  # a weight of 16 bits with a coordinate of 32
        owner, leaf = where[name] = _place(own, names[name])
        owner.register_parameter(leaf, leaves[name])
    for name, value in buffers.items():
        own.get_buffer(name).copy_(value)
    if derived:
        plain = {name: places[name][0] for name in leaves.keys() - where.keys()}
        expansion = _Expansion(
            space, base, basis, {n: (plain | where)[n] for n in coords}, {n: places[n] for n in derived}
        )
        expansion.install(own)
    constants = dict(module.named_parameters())
    fixed = {n: base.get(n, constants[n]).detach() for n, p in own.named_parameters() if not p.requires_grad}
    return TrainableModule(own, {name: names[name] for name in coords}, fixed, tuple(buffers))


@dataclass(eq=False)
class _Expansion:
    """Computes weights from coordinates when the module is called: hooks before and after its forward pass."""

    space: Space
    base: Tree
    basis: Tree
    coords: dict[str, Place]
    weights: dict[str, list[Place]]
    depth: int = 0  # of calls of modules that hold all derived weights
    moved: dict[torch.device, tuple[Tree, Tree]] = field(default_factory=dict)

    def install(self, module: nn.Module) -> None:
        """Add hooks to the module, and to those inside of it that hold all derived weights: they can be called too."""
        owners = {id(owner) for places in self.weights.values() for owner, _ in places}
        for part in module.modules():
            if owners <= {id(inner) for inner in part.modules()}:
                part.register_forward_pre_hook(self._before)
                part.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if not self.depth:
            coords = {name: _parameter(place) for name, place in self.coords.items()}
            made = self.space.expand(*self._constants(next(iter(coords.values())).device), coords)
            for name, places in self.weights.items():
                for owner, leaf in places:
                    setattr(owner, leaf, made[name])
        self.depth += 1

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1

    def _constants(self, device: torch.device) -> tuple[Tree, Tree]:
        """Base and basis on the device of the parameters, to which a trainer may have moved them."""
        if device not in self.moved:
            self.moved = {device: (to_device(self.base, device), to_device(self.basis, device))}
        return self.moved[device]


def _places(module: nn.Module) -> dict[str, list[Place]]:
    """By the first name of each parameter, all places that hold it: a tied weight has several."""
    first: dict[int, str] = {}
    found: dict[str, list[Place]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        at = first.setdefault(id(parameter), name)
        owner, _, leaf = name.rpartition(".")
        found.setdefault(at, []).append((module.get_submodule(owner), leaf))
    return found


def _place(module: nn.Module, coordinate: str) -> Place:
    """Where a coordinate is registered: `fc.weight/a` as `weight/a` of the module `fc`, `model/b` at the top."""
    weight, slash, part = coordinate.partition("/")
    owner, _, leaf = weight.rpartition(".")
    return module.get_submodule(owner), f"{leaf}{slash}{part.replace('.', '_')}"


def _parameter(place: Place) -> Tensor:
    owner, leaf = place
    found = owner._parameters[leaf]
    assert found is not None
    return found


def read_returned(
    answer: Any, given: TrainableModule, start: Tree, buffers: Tree, label: str
) -> tuple[Tree, Tree, float | None]:
    """The coordinates, buffers and loss (None without one) that a trainer returned.

    Args:
        answer: the model or its state dict, alone or in a pair with a loss; None for the model that was given, trained
            in place.
        given: the model that it was given.
        start: the coordinates before.
        buffers: the buffers before.
        label: the name of the trainer, for errors.
    """
    loss: float | None = None
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], int | float | Tensor):
            raise ConfigError(
                f"{label} returned {visible(repr(answer[1:]), 80)} beside the model; return (model, loss)"
            )
        answer, loss = answer[0], float(answer[1])
    tensors = _tensors(given.module if answer is None else answer, label)
    coords = {
        name: _checked(tensors, given.names[name], block, label).to(block.device) for name, block in start.items()
    }
    after = {name: _checked(tensors, name, block, label).to(block.device) for name, block in buffers.items()}
    for name, before in given.fixed.items():  # changes of these would be lost without a word
        now = tensors.get(name)
        if isinstance(now, Tensor) and not torch.equal(now.to(before.device), before):
            raise ConfigError(
                f"{label} changed {visible(name)!r}, which this method does not train and would be lost; train "
                "parameters with requires_grad=True only"
            )
    return coords, after, loss


def _tensors(answer: Any, label: str) -> Mapping[str, Any]:
    """The parameters and buffers of what was returned, by name."""
    if isinstance(answer, nn.Module):
        named = (answer.named_parameters(remove_duplicate=False), answer.named_buffers(remove_duplicate=False))
        return {name: tensor for one in named for name, tensor in one}
    if isinstance(answer, Mapping):
        return answer
    raise ConfigError(
        f"{label} returned an object of type {type(answer).__name__}; return the model or its state_dict()"
    )


def _checked(tensors: Mapping[str, Any], name: str, like: Tensor, label: str) -> Tensor:
    """The tensor of a name, which has the shape and type of the one before."""
    found = tensors.get(name)
    if found is None:
        wrapped = f"module.{name}" in tensors
        instead = "return accelerator.unwrap_model(model)" if wrapped else "return the model that was given"
        raise ConfigError(f"{label} returned a model without {visible(name)!r}; {instead}, or its state_dict()")
    if not isinstance(found, Tensor) or found.layout != torch.strided:
        raise ConfigError(f"{label} returned {visible(name)!r} of type {type(found).__name__}; expected a dense tensor")
    if found.shape != like.shape:
        raise ConfigError(
            f"{label} returned {visible(name)!r} of shape {list(found.shape)}; expected {list(like.shape)}, as given"
        )
    if found.dtype != like.dtype:
        raise ConfigError(
            f"{label} returned {visible(name)!r} of type {found.dtype}; expected {like.dtype}, as given: compute in 16 "
            "bits under autocast, which keeps weights as they are"
        )
    if not torch.isfinite(found).all():
        raise Diverged(f"{label} returned {visible(name)!r} with a value that is not finite; try a smaller lr")
    return found.detach()
