"""Different codecs for different blocks: for example few bits for large matrices, exact values for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from thinwire.codecs.base import Codec, Peer, Raw, check_fits
from thinwire.core.names import as_rules, matches, select
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, restrict
from thinwire.errors import ConfigError, WireError
from thinwire.wire.bits import Bytes, prefixed, read_prefixed, varint


@dataclass(frozen=True)
class CodecRule:
    """Selectors of block names, and the codec of the blocks that they match."""

    on: tuple[str, ...]
    codec: Codec


Pair = tuple[str | tuple[str, ...], Codec]


@register_part("codec", "route")
class ByBlock(Codec):
    """Use a different codec for each group of blocks; the first rule that matches a block applies.

        bytes = v length, codec_0(blocks of rule 0); v length, codec_1(...); ...; codec_last(...)

    Args:
        rules: pairs `(selector or selectors, codec)`; the last selector is `*`, so that each block has a codec. In
            TOML: `rules = [{ on = ["*.weight"], codec = { kind = "quantize" } }, { on = ["*"], codec = "raw" }]`.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> from thinwire.codecs import Quantize
    >>> codec, peer = ByBlock((("*.weight", Quantize(8)), ("*", Raw()))), Peer(Key(0))
    >>> tree = {"fc.weight": torch.ones(30, 2), "fc.bias": torch.tensor([0.123])}
    >>> data, _ = codec.encode(tree, {}, peer)
    >>> len(data) < 64, codec.decode(data, Spec.of(tree), peer)["fc.bias"] == tree["fc.bias"]
    (True, tensor([True]))

    The codec of a rule sees the blocks of this rule only: `TopK` selects among those. A rule without blocks, in a round
    that synchronizes some blocks only, takes no bytes. With one rule the bytes are those of its codec.

    Not `Route`, which selects the space in which each block is trained.
    """

    rules: tuple[CodecRule | Pair, ...] = (CodecRule(("*",), Raw()),)

    def __post_init__(self) -> None:
        rules = as_rules(CodecRule, self.rules, "rules of ByBlock")
        if not rules or rules[-1].on != ("*",):
            raise ConfigError("the last rule of ByBlock must match all remaining blocks; end with ('*', Raw())")
        object.__setattr__(self, "rules", rules)  # normalized, so that equal codecs compare equal

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if a selector matches none of the blocks that can be sent."""
        for rule in cast("tuple[CodecRule, ...]", self.rules):
            if rule.on != ("*",):
                select(spec.names, rule.on, what="rule")
        for _, codec, names in self._groups(spec.names):
            check_fits(codec, spec.restrict(names))

    def init(self, spec: Spec) -> Tree:
        """The states of all codecs; names are prefixed by the index of the rule."""
        out: Tree = {}
        for i, codec, names in self._groups(spec.names):
            out.update({f"{i}/{name}": block for name, block in codec.init(spec.restrict(names)).items()})
        return out

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The payload of each rule that has blocks, all but the last preceded by their length."""
        parts, after = [], dict(state)
        for i, codec, names in self._groups(tuple(tree)):
            own = {name.removeprefix(f"{i}/"): block for name, block in state.items() if name.startswith(f"{i}/")}
            data, own = codec.encode(restrict(tree, names), own, _rule_peer(peer, i))
            after.update({f"{i}/{name}": block for name, block in own.items()})
            parts.append(data)
        return b"".join([*map(prefixed, parts[:-1]), *parts[-1:]]), after

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The blocks of all rules, in the order of the spec."""
        groups, rest = self._groups(spec.names), data
        decoded: Tree = {}
        for i, codec, names in groups:
            part, rest = (rest, b"") if i == groups[-1][0] else read_prefixed(rest, "the blocks of a rule")
            decoded.update(codec.decode(part, spec.restrict(names), _rule_peer(peer, i)))
        if rest:
            raise WireError(f"{len(rest)} bytes follow the last block")
        return {name: decoded[name] for name in spec.names}

    def size(self, spec: Spec) -> int | None:
        """The sum of the sizes of all rules, or None if one of them varies."""
        sizes = [codec.size(spec.restrict(names)) for _, codec, names in self._groups(spec.names)]
        known = [size for size in sizes if size is not None]
        return None if len(known) < len(sizes) else sum(known) + sum(len(varint(size)) for size in known[:-1])

    def _groups(self, names: tuple[str, ...]) -> list[tuple[int, Codec, tuple[str, ...]]]:
        """Index, codec and block names of each rule that has blocks."""
        groups: dict[int, list[str]] = {}
        rules = cast("tuple[CodecRule, ...]", self.rules)  # __post_init__ has converted all pairs
        for name in names:
            first = next(i for i, rule in enumerate(rules) if matches(name, rule.on))
            groups.setdefault(first, []).append(name)
        return [(i, rules[i].codec, tuple(groups[i])) for i in sorted(groups)]


def _rule_peer(peer: Peer, i: int) -> Peer:
    """Separate randomness for each rule; the first uses the peer's, so that a single rule equals its codec."""
    return Peer(peer.key.fold("rule", i), peer.everyone.fold("rule", i), peer.mask, peer.known) if i else peer
