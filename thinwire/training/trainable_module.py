"""A module whose trainable parameters are the coordinates of a space, for trainers that know modules only.

    full     the weights themselves
    lora     A and B: parameters `fc.weight/a`, `fc.weight/b`; the matrix W = W0 + s B A in each forward pass
    mapo     b: the parameter `model/b`

The state dict has the names of the coordinates, so that what a trainer returns is read by name. Weights that do not
depend on coordinates are parameters without a gradient, as in peft.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.tree import Tree, to_device
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space

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
    """A copy of a module at these coordinates.

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
