"""Composition of codecs: the values that one selects are encoded by the next."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from thinwire.codecs.base import Codec, Peer, Raw, check_fits
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes


@register("codec", "chain")
@dataclass(frozen=True)
class Chain(Codec):
    """Compose codecs: encode with all of them in order, decode in reverse order.

        Chain((a, b, c)) = a(inner=b(inner=c))

    Args:
        parts: the codecs. All but the last must have an `inner` codec that is not set: `ErrorFeedback`, `TopK`,
            `Threshold`, `RandomK`, `Masked`, `RankSlice`. The last may be any codec.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> from thinwire.codecs import Quantize, TopK
    >>> tree, peer = {"w": torch.arange(100.0)}, Peer(Key(0))
    >>> chain, nested = Chain((TopK(0.1), Quantize(4))), TopK(0.1, inner=Quantize(4))
    >>> chain.encode(tree, {}, peer) == nested.encode(tree, {}, peer)
    True

    Not `ByBlock`, which applies codecs side by side, to different blocks.
    """

    parts: tuple[Codec, ...] = (Raw(),)

    def __post_init__(self) -> None:
        if isinstance(self.parts, list):
            object.__setattr__(self, "parts", tuple(self.parts))
        if not isinstance(self.parts, tuple) or not self.parts:
            raise ConfigError(
                f"Chain needs a tuple of codecs, for example Chain((TopK(0.1), Quantize(4))), not {self.parts!r}"
            )
        for i, part in enumerate(self.parts[:-1]):
            name, after = type(part).__name__, type(self.parts[i + 1]).__name__
            if not _has_inner(part):
                swapped = _has_inner(self.parts[i + 1])
                instead = f"write Chain(({after}(...), {name}(...)))" if swapped else f"keep either {name} or {after}"
                raise ConfigError(f"{name} has no inner codec, so no codec can follow it in a Chain; {instead}")
            inner = vars(part)["inner"]
            if inner != Raw():
                raise ConfigError(
                    f"{name} in a Chain has an inner codec already; write it as the next part: "
                    f"Chain(({name}(...), {type(inner).__name__}(...)))"
                )
        _ = self.codec  # raises a ConfigError if these cannot be nested

    @cached_property
    def codec(self) -> Codec:
        """The equivalent nested codec."""
        out = self.parts[-1]
        for part in reversed(self.parts[:-1]):
            out = dataclasses.replace(part, inner=out)  # type: ignore[type-var]
        return out

    @property
    def exact(self) -> bool:
        """As the nested codec."""
        return self.codec.exact

    @property
    def summable(self) -> bool:
        """As the nested codec."""
        return self.codec.summable

    @property
    def keeps_zeros(self) -> bool:
        """As the nested codec."""
        return self.codec.keeps_zeros

    def check(self, spec: Spec) -> None:
        """Check the nested codec."""
        check_fits(self.codec, spec)

    def init(self, spec: Spec) -> Tree:
        """The state of the nested codec."""
        return self.codec.init(spec)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """As the nested codec."""
        return self.codec.encode(tree, state, peer)

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """As the nested codec."""
        return self.codec.decode(data, spec, peer)

    def size(self, spec: Spec) -> int | None:
        """As the nested codec."""
        return self.codec.size(spec)


def _has_inner(part: Codec) -> bool:
    """Whether a codec encodes its values with an inner one."""
    return dataclasses.is_dataclass(part) and any(field.name == "inner" for field in dataclasses.fields(part))
