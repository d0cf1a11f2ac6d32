"""Different codecs for different blocks: few bits for large matrices, exact numbers for the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from thinwire.codecs.base import Codec, Peer, Raw, check_fits
from thinwire.core.registry import register
from thinwire.core.spec import Spec, matches, select
from thinwire.core.tree import Tree, restrict
from thinwire.errors import ConfigError, WireError
from thinwire.wire.bits import Bytes, read_varint, varint


@dataclass(frozen=True)
class CodecRule:
    """Which blocks, by selectors on their names, and the codec that sends them."""

    on: tuple[str, ...]
    codec: Codec


Pair: TypeAlias = tuple[str | tuple[str, ...], Codec]


@register("codec", "route")
@dataclass(frozen=True)
class ByBlock(Codec):
    """Send some blocks with one codec and others with another; the first rule that matches a block has it.

        bytes = v length, codec_0(blocks of rule 0); v length, codec_1(...); ...; codec_last(...)

    Args:
        rules: pairs `(selector or selectors, codec)`; the last selector is `*`, so that every block has a codec. In a
            file: `rules = [{ on = ["*.weight"], codec = { kind = "quantize" } }, { on = ["*"], codec = "raw" }]`.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> from thinwire.codecs import Quantize
    >>> codec, peer = ByBlock((("*.weight", Quantize(8)), ("*", Raw()))), Peer(Key(0))
    >>> tree = {"fc.weight": torch.ones(30, 2), "fc.bias": torch.tensor([0.123])}
    >>> data, _ = codec.encode(tree, {}, peer)
    >>> len(data) < 64, codec.decode(data, Spec.of(tree), peer)["fc.bias"] == tree["fc.bias"]
    (True, tensor([True]))

    The blocks of a rule are all that its codec sees: a `TopK` takes the largest of them. In a round in which some
    blocks are silent a rule may have none, and costs nothing then. With one rule the bytes are those of its codec.

    Not the route of spaces, which says how blocks are trained.
    """

    rules: tuple[CodecRule | Pair, ...] = (CodecRule(("*",), Raw()),)

    def __post_init__(self) -> None:
        rules = []
        for rule in self.rules:
            if not isinstance(rule, CodecRule):
                if not isinstance(rule, tuple) or len(rule) != 2:
                    raise ConfigError(f"a rule of ByBlock is a pair of selectors and a codec, not {rule!r}")
                rule = CodecRule((rule[0],) if isinstance(rule[0], str) else tuple(rule[0]), rule[1])
            if not rule.on:
                raise ConfigError(f"a rule for {rule.codec!r} selects nothing; write for example on = ['*']")
            rules.append(rule)
        if not rules or rules[-1].on != ("*",):
            raise ConfigError("the last rule of ByBlock must take what is left: end with ('*', Raw())")
        object.__setattr__(self, "rules", tuple(rules))  # one way to write it, so that equal ones are equal

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError when a selector matches none of all the blocks that will ever be sent."""
        for rule in self._rules():
            if rule.on != ("*",):
                select(spec.names, rule.on, what="rule")
        for _, codec, names in self._shares(spec.names):
            check_fits(codec, spec.restrict(names))

    def init(self, spec: Spec) -> Tree:
        """The states of all codecs, each name behind the number of its rule."""
        out: Tree = {}
        for i, codec, names in self._shares(spec.names):
            out.update({f"{i}/{name}": block for name, block in codec.init(spec.restrict(names)).items()})
        return out

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The bytes of each rule that has blocks, all but the last behind their length."""
        parts, after = [], dict(state)
        for i, codec, names in self._shares(tuple(tree)):
            mine = {name.removeprefix(f"{i}/"): block for name, block in state.items() if name.startswith(f"{i}/")}
            data, mine = codec.encode(restrict(tree, names), mine, _own(peer, i))
            after.update({f"{i}/{name}": block for name, block in mine.items()})
            parts.append(data)
        return b"".join([*(varint(len(part)) + part for part in parts[:-1]), *parts[-1:]]), after

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The blocks of all rules, in the order of the specification."""
        shares = self._shares(spec.names)
        made: Tree = {}
        position = 0
        for i, codec, names in shares:
            end = len(data)
            if i != shares[-1][0]:
                length, position = read_varint(data, position)
                end = position + length
                if end > len(data):
                    raise WireError(f"a rule announces {length} bytes, {len(data) - position} are left")
            made.update(codec.decode(data[position:end], spec.restrict(names), _own(peer, i)))
            position = end
        if position != len(data):
            raise WireError(f"{len(data) - position} bytes follow the last block")
        return {name: made[name] for name in spec.names}

    def size(self, spec: Spec) -> int | None:
        """The sum of all, if all are known."""
        sizes = []
        for _, codec, names in self._shares(spec.names):
            size = codec.size(spec.restrict(names))
            if size is None:
                return None
            sizes.append(size)
        return sum(sizes) + sum(len(varint(size)) for size in sizes[:-1])

    def _rules(self) -> list[CodecRule]:
        return [rule for rule in self.rules if isinstance(rule, CodecRule)]  # all are, since __post_init__

    def _shares(self, names: tuple[str, ...]) -> list[tuple[int, Codec, tuple[str, ...]]]:
        """Number, codec and blocks of each rule that has any."""
        mine: dict[int, list[str]] = {}
        rules = self._rules()
        for name in names:
            first = next(i for i, rule in enumerate(rules) if matches(name, rule.on))
            mine.setdefault(first, []).append(name)
        return [(i, rules[i].codec, tuple(mine[i])) for i in sorted(mine)]


def _own(peer: Peer, i: int) -> Peer:
    """Randomness of its own for each rule; the first has the peer's, so that one rule alone is its codec."""
    return replace(peer, key=peer.key.fold("rule", i), everyone=peer.everyone.fold("rule", i)) if i else peer
