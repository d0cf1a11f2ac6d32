"""Different spaces for different blocks of a model: adapters in the attention, a whole head, the rest frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec, select
from thinwire.core.tree import Tree, restrict
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.frozen import Frozen
from thinwire.spaces.full import Full
from thinwire.spaces.unmerged import Unmerged

_WHOLE = "model/"  # how a space names coordinates that belong to no single weight


@dataclass(frozen=True)
class Rule:
    """Which blocks, by selectors on their names, and the space in which they are trained."""

    on: tuple[str, ...]
    space: Space


Pair: TypeAlias = tuple[str | tuple[str, ...], Space]


@register("space", "route")
@dataclass(frozen=True)
class Route(Space):
    """Train some blocks of a model in one way and others in another; the first rule that matches a block has it.

        weights[block] = space(block).expand(...)[block],    space(block): of the first rule that matches

    Args:
        rules: pairs `(selector or selectors, space)`. Together they must cover the model: end with `("*", Frozen())`
            to leave the rest as it is. In a file: `rules = [{ on = ["*"], space = "frozen" }]`.

    >>> import torch
    >>> from thinwire.spaces import LoRA
    >>> space = Route((("*attn*.weight", LoRA(rank=2)), ("head.*", Full()), ("*", Frozen())))
    >>> base = {"attn.weight": torch.ones(4, 4), "fc.weight": torch.ones(4, 4), "head.weight": torch.ones(2, 4)}
    >>> list(space.init(base, space.basis(Spec.of(base), Key(0), None), Key(0)))
    ['attn.weight/a', 'attn.weight/b', 'head.weight']

    The blocks of a rule are all that its space sees: a space that draws one direction for a whole model draws one for
    them. Its coordinates keep their names; those of no single weight (`model/b`) get the number of their rule in front
    (`model/0/b`). A route over one rule is the space of that rule, bit for bit but for such names.

    Spaces that merge (`redraw_every`) must do it in the same rounds; beside them only `Full` and `Frozen`, to which a
    merge makes no difference, may stand.

    Not a schedule: every coordinate here is trained in every round; `Every(private=...)` says what is sent.
    """

    rules: tuple[Rule | Pair, ...] = (Rule(("*",), Full()),)

    def __post_init__(self) -> None:
        rules = []
        for rule in self.rules:
            if not isinstance(rule, Rule):
                if not isinstance(rule, tuple) or len(rule) != 2:
                    raise ConfigError(f"a rule of Route is a pair of selectors and a space, not {rule!r}")
                rule = Rule((rule[0],) if isinstance(rule[0], str) else tuple(rule[0]), rule[1])
            if not rule.on:
                raise ConfigError(f"a rule for {rule.space!r} selects nothing; write for example on = ['*']")
            rules.append(rule)
        if not rules:
            raise ConfigError("Route needs at least one rule, for example ('*', Full())")
        object.__setattr__(self, "rules", tuple(rules))  # one way to write it, so that equal routes are equal
        merging = [rule.space for rule in rules if rule.space.redraw_every]
        for rule in rules:
            if not merging or isinstance(rule.space, Full | Frozen):
                continue
            if rule.space.redraw_every != merging[0].redraw_every:
                raise ConfigError(
                    f"{merging[0]!r} merges after {merging[0].redraw_every} rounds, {rule.space!r} "
                    f"{f'after {rule.space.redraw_every}' if rule.space.redraw_every else 'never'}; "
                    "all spaces of a Route but Full and Frozen need the same redraw_every"
                )

    @property
    def redraw_every(self) -> int:
        """Rounds after which all spaces merge and begin anew; 0 means never."""
        return max(space.redraw_every for space in self._spaces())

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError when a block has no rule, a rule no block, or a space cannot hold its blocks."""
        for space, names in self._shares(spec.names):
            if names:
                space.check(spec.restrict(names))

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """The bases of all spaces, each name behind the number of its rule."""
        out: Tree = {}
        for i, (space, names) in enumerate(self._shares(spec.names)):
            if names:
                part = space.basis(spec.restrict(names), _key(key, i), device)
                out.update({f"{i}/{name}": block for name, block in part.items()})
        return out

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """The first coordinates of all spaces."""
        out: Tree = {}
        for i, (space, names) in enumerate(self._shares(tuple(base))):
            if names:
                part = space.init(restrict(base, names), _own_frame(basis, i), _key(key, i))
                out.update({_outside(name, i): block for name, block in part.items()})
        return out

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The weights of all spaces, in the order of the model."""
        return self._make(base, basis, coords, lambda space, *trees: space.expand(*trees))

    def unmerged(self) -> Space:
        """Return a route that keeps the adapters of its spaces apart from the weights."""
        return Unmerged(self)

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The weights of all spaces, corrections beside them where a space has such: see `unmerged`."""
        return self._make(base, basis, coords, lambda space, *trees: space.unmerged().expand(*trees))

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The same, with what each space leaves out of a trained model left out."""
        return self._make(base, basis, coords, lambda space, *trees: space.evaluation_weights(*trees))

    def _make(self, base: Tree, basis: Tree, coords: Tree, how: Callable[[Space, Tree, Tree, Tree], Tree]) -> Tree:
        made: Tree = {}
        for i, (space, names) in enumerate(self._shares(tuple(base))):
            if names:
                own = frozenset(names)
                part = {_inside(name, i): block for name, block in coords.items() if _belongs(name, i, own)}
                made.update(how(space, restrict(base, names), _own_frame(basis, i), part))
        corrections = {name: block for name, block in made.items() if name not in base}
        return {name: made[name] for name in base} | corrections

    def _spaces(self) -> list[Space]:
        return [rule.space for rule in self.rules if isinstance(rule, Rule)]  # all are, since __post_init__

    def _shares(self, names: tuple[str, ...]) -> list[tuple[Space, tuple[str, ...]]]:
        """Each rule's space and blocks. Only a last `*` may be left without any: it is there to catch the rest."""
        free = dict.fromkeys(names)
        shares = []
        for rule in self.rules:
            assert isinstance(rule, Rule)
            mine = tuple(name for name in select(names, rule.on, what="rule") if name in free)
            if not mine and rule.on != ("*",):
                raise ConfigError(
                    f"no block is left for the rule {', '.join(rule.on)!r}: earlier rules have them; put it before them"
                )
            for name in mine:
                del free[name]
            shares.append((rule.space, mine))
        if free:
            raise ConfigError(f"no rule of the route matches {next(iter(free))!r}; end with ('*', Frozen())")
        return shares


def _key(key: Key, i: int) -> Key:
    """A stream for each rule; the first has the key itself, so that a route of one rule is its space."""
    return key.fold("rule", i) if i else key


def _own_frame(basis: Tree, i: int) -> Tree:
    return {name.removeprefix(f"{i}/"): block for name, block in basis.items() if name.startswith(f"{i}/")}


def _outside(name: str, i: int) -> str:
    return f"{_WHOLE}{i}/{name.removeprefix(_WHOLE)}" if name.startswith(_WHOLE) else name


def _inside(name: str, i: int) -> str:
    return name.replace(f"{_WHOLE}{i}/", _WHOLE, 1) if name.startswith(_WHOLE) else name


def _belongs(name: str, i: int, own: frozenset[str]) -> bool:
    """Whether coordinates are of rule i: named after one of its weights, or after the rule."""
    return name in own or name.split("/", 1)[0] in own or name.startswith(f"{_WHOLE}{i}/")
