"""Codecs one after another: each hands the numbers that it picked to the next."""

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
    """Apply codecs one after another, and undo them in reverse.

        Chain((a, b, c)) = a(inner=b(inner=c))

    Args:
        parts: the codecs. All but the last must leave numbers to the next one (have an `inner` codec that is not set):
            `ErrorFeedback`, `TopK`, `Threshold`, `RandomK`. The last may be anything.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> from thinwire.codecs import Quantize, TopK
    >>> tree, peer = {"w": torch.arange(100.0)}, Peer(Key(0))
    >>> chain, nested = Chain((TopK(0.1), Quantize(4))), TopK(0.1, inner=Quantize(4))
    >>> chain.encode(tree, {}, peer) == nested.encode(tree, {}, peer)
    True
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
            if not _opens(part):
                turned = _opens(self.parts[i + 1])
                instead = f"write Chain(({after}(...), {name}(...)))" if turned else f"keep either {name} or {after}"
                raise ConfigError(f"{name} makes bytes, so nothing can follow it in a Chain; {instead}")
            inner = vars(part)["inner"]
            if inner != Raw():
                raise ConfigError(
                    f"{name} in a Chain has an inner codec already; write it as the next part: "
                    f"Chain(({name}(...), {type(inner).__name__}(...)))"
                )
        _ = self.codec  # refuses what cannot be nested

    @cached_property
    def codec(self) -> Codec:
        """The same, nested."""
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
        """Ask all of them."""
        check_fits(self.codec, spec)

    def init(self, spec: Spec) -> Tree:
        """The state of the first codec that has one."""
        return self.codec.init(spec)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The bytes of all."""
        return self.codec.encode(tree, state, peer)

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The tree that they say."""
        return self.codec.decode(data, spec, peer)

    def size(self, spec: Spec) -> int | None:
        """The size of all."""
        return self.codec.size(spec)


def _opens(part: Codec) -> bool:
    """Whether a codec hands numbers on to an inner one."""
    return dataclasses.is_dataclass(part) and any(field.name == "inner" for field in dataclasses.fields(part))
