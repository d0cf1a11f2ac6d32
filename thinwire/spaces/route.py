"""Different spaces for different blocks of a model: adapters for attention, a dense head, the rest frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from thinwire.core.key import Device, Key
from thinwire.core.names import as_rules, select
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, restrict
from thinwire.errors import ConfigError
from thinwire.spaces.base import Full, Space

_WHOLE = "model/"  # prefix of coordinates that belong to no single weight


@dataclass(frozen=True)
class Rule:
    """Selectors of blocks, and the space in which they are trained."""

    on: tuple[str, ...]
    space: Space


Pair = tuple[str | tuple[str, ...], Space]


@register_part("space", "route")
class Route(Space):
    """Train different blocks of a model in different spaces; the first rule that matches a block applies.

        weights[block] = space(block).expand(...)[block],    space(block): of the first rule that matches

    Args:
        rules: pairs `(selector or selectors, space)`. Together they must match all blocks: end with `("*", Frozen())`
            to freeze the rest. In a file: `rules = [{ on = ["*"], space = "frozen" }]`.

    >>> import torch
    >>> from thinwire.spaces import Frozen, LoRA
    >>> space = Route((("*attn*.weight", LoRA(rank=2)), ("head.*", Full()), ("*", Frozen())))
    >>> base = {"attn.weight": torch.ones(4, 4), "fc.weight": torch.ones(4, 4), "head.weight": torch.ones(2, 4)}
    >>> list(space.init(base, space.basis(Spec.of(base), Key(0), None), Key(0)))
    ['attn.weight/a', 'attn.weight/b', 'head.weight']

    A space receives only the blocks of its rule: MAPO draws one direction for these blocks, not for the model.
    Coordinates keep their names, except that those of no single weight (`model/b`) contain the index of their rule
    (`model/0/b`). A route of one rule equals the space of that rule, bit for bit, up to these names.

    Spaces that merge (`redraw_every`) must merge in the same rounds, and can only be combined with each other, `Full`
    and `Frozen`, to which merging makes no difference.

    Not a schedule: all coordinates are trained in every round. To train blocks without sending them, use
    `AllBlocks(private=...)`.
    """

    rules: tuple[Rule | Pair, ...] = (Rule(("*",), Full()),)

    def __post_init__(self) -> None:
        rules = as_rules(Rule, self.rules, "rules of Route")
        if not rules:
            raise ConfigError("Route needs at least one rule, for example ('*', Full())")
        object.__setattr__(self, "rules", rules)  # normalized, so that equal routes compare equal
        if odd := [rule.space for rule in rules if rule.space.stacking is not None]:
            raise ConfigError(
                f"{type(odd[0]).__name__} cannot be part of a Route; use it alone, and write target_modules and "
                "modules_to_save"
            )
        merging = [rule.space for rule in rules if rule.space.redraw_every]
        for rule in rules:
            if not merging or rule.space.unaffected_by_merging:
                continue
            if rule.space.redraw_every != merging[0].redraw_every:
                raise ConfigError(
                    f"{merging[0]!r} merges after {merging[0].redraw_every} rounds, {rule.space!r} "
                    f"{f'after {rule.space.redraw_every}' if rule.space.redraw_every else 'never'}; "
                    "all spaces of a Route except Full and Frozen need the same redraw_every"
                )
        for flag in ("redraw_every", "reparametrized", "reads_base", "counts_from_start"):
            object.__setattr__(self, flag, max(getattr(rule.space, flag) for rule in rules))

    def over(self, rounds: int) -> Route:
        """Return the route with the spaces of a run of that many rounds."""
        rules = cast("tuple[Rule, ...]", self.rules)
        return replace(self, rules=tuple(Rule(rule.on, rule.space.over(rounds)) for rule in rules))

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if a block has no rule, a rule no block, or a space cannot be used for its blocks."""
        for space, names in self._assign(spec.names):
            if names:
                space.check(spec.restrict(names))

    def note(self, spec: Spec) -> str:
        """Return the notes of all spaces."""
        notes = (space.note(spec.restrict(names)) for space, names in self._assign(spec.names) if names)
        return " ".join(filter(None, notes))

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return the bases of all spaces, named `index of the rule/name`."""
        return self.basis_from(spec.shapes(), key, device)

    def basis_from(self, base: Tree, key: Key, device: Device) -> Tree:
        """Return the bases of all spaces for these initial weights."""
        out: Tree = {}
        for i, space, own, _, _ in self._each(base, {}, {}):
            part = space.basis_from(own, _key(key, i), device)
            out.update({f"{i}/{name}": block for name, block in part.items()})
        return out

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the initial coordinates of all spaces."""
        out: Tree = {}
        for i, space, own, drawn, _ in self._each(base, basis, {}):
            part = space.init(own, drawn, _key(key, i))
            out.update({_to_route(name, i): block for name, block in part.items()})
        return out

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights of all spaces, in the order of the model."""
        return self._weights("expand", base, basis, coords)

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights of all spaces, followed by the adapters of spaces that have them."""
        return self._weights("expand_unmerged", base, basis, coords)

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the evaluation weights of all spaces, in the order of the model."""
        return self._weights("evaluation_weights", base, basis, coords)

    def to_trained(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the values that clients train in all spaces."""
        return self._coords("to_trained", base, basis, coords)

    def from_trained(self, base: Tree, basis: Tree, trained: Tree) -> Tree:
        """Return the coordinates of values trained in all spaces."""
        return self._coords("from_trained", base, basis, trained)

    def _weights(self, method: str, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights that a method of each space makes, and the adapters."""
        made: Tree = {}
        for _, space, *trees in self._each(base, basis, coords):
            made.update(getattr(space, method)(*trees))
        adapters = {name: block for name, block in made.items() if name not in base}
        return {name: made[name] for name in base} | adapters

    def _coords(self, method: str, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the coordinates that a method of each space makes."""
        made: Tree = {}
        for i, space, *trees in self._each(base, basis, coords):
            made.update({_to_route(name, i): block for name, block in getattr(space, method)(*trees).items()})
        return {name: made[name] for name in coords}

    def _each(self, base: Tree, basis: Tree, coords: Tree) -> Iterator[tuple[int, Space, Tree, Tree, Tree]]:
        """Of each rule that has blocks its number, space, base, basis and coordinates."""
        for i, (space, names) in enumerate(self._assign(tuple(base))):
            if names:
                own = frozenset(names)
                part = {_from_route(name, i): block for name, block in coords.items() if _belongs(name, i, own)}
                yield i, space, restrict(base, names), _basis_of(basis, i), part

    def _assign(self, names: tuple[str, ...]) -> list[tuple[Space, tuple[str, ...]]]:
        """Return the space and the blocks of each rule. Only the rule `*` may match no remaining block."""
        free = dict.fromkeys(names)
        assigned = []
        for rule in cast("tuple[Rule, ...]", self.rules):  # all are, since __post_init__
            mine = tuple(name for name in select(names, rule.on, what="rule") if name in free)
            if not mine and rule.on != ("*",):
                raise ConfigError(
                    f"no block is left for the rule {', '.join(rule.on)!r}; put it before earlier rules that match"
                )
            for name in mine:
                del free[name]
            assigned.append((rule.space, mine))
        if free:
            raise ConfigError(f"no rule of the route matches {next(iter(free))!r}; end with ('*', Frozen())")
        return assigned


def _key(key: Key, i: int) -> Key:
    """Return the key of a rule: for the first that of the route, so that a route of one rule equals its space."""
    return key.fold("rule", i) if i else key


def _basis_of(basis: Tree, i: int) -> Tree:
    return {name.removeprefix(f"{i}/"): block for name, block in basis.items() if name.startswith(f"{i}/")}


def _to_route(name: str, i: int) -> str:
    return f"{_WHOLE}{i}/{name.removeprefix(_WHOLE)}" if name.startswith(_WHOLE) else name


def _from_route(name: str, i: int) -> str:
    return name.replace(f"{_WHOLE}{i}/", _WHOLE, 1) if name.startswith(_WHOLE) else name


def _belongs(name: str, i: int, own: frozenset[str]) -> bool:
    """Return whether coordinates belong to rule i: named after one of its weights, or after the rule."""
    return name in own or name.split("/", 1)[0] in own or name.startswith(f"{_WHOLE}{i}/")
