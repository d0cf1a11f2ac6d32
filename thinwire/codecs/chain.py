"""Codecs around others: composition, and error feedback, which adds the compression error of a message to the next.

Papers: Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

from thinwire.codecs.base import Codec, Peer, Raw, Wrapper
from thinwire.core.registry import rare, register_part
from thinwire.core.text import Share
from thinwire.core.tree import Spec, Tree, common_type
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes


@register_part("codec", "chain")
class Chain(Wrapper):
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

    @classmethod
    def of(cls, *codecs: Codec) -> Chain:
        """These codecs in sequence, with the parts of chains among them; equal neighbors count once (`ef+topk`)."""
        parts = [one for codec in codecs for one in (codec.parts if isinstance(codec, Chain) else [codec])]
        return cls(tuple(one for before, one in zip([None, *parts], parts, strict=False) if one != before))

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
        _ = self.inner  # raises a ConfigError if these cannot be nested

    @cached_property
    def inner(self) -> Codec:  # type: ignore[override]
        """The equivalent nested codec."""
        out = self.parts[-1]
        for part in reversed(self.parts[:-1]):
            out = dataclasses.replace(part, inner=out)  # type: ignore[type-var]
        return out

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """As the nested codec."""
        return self.inner.exact

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        """As the nested codec."""
        return self.inner.keeps_zeros

    def init(self, spec: Spec) -> Tree:
        """The state of the nested codec."""
        return self.inner.init(spec)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """As the nested codec."""
        return self.inner.encode(tree, state, peer)


def _has_inner(part: Codec) -> bool:
    """Whether a codec encodes its values with an inner one."""
    return dataclasses.is_dataclass(part) and any(field.name == "inner" for field in dataclasses.fields(part))


_REST = "rest/"


@register_part("codec", "error-feedback", paper="Karimireddy et al., ICML 2019")
class ErrorFeedback(Wrapper):
    """Add the compression error of earlier messages to each message, so that no part of the updates is lost.

        send C(x + decay e),    e <- x + decay e - C(x + decay e)

    Args:
        inner: the lossy codec C.
        decay: factor of the earlier error, above 0 and at most 1; below 1 old errors are forgotten (SparseLoCo: 0.95).

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> from thinwire.codecs import TopK
    >>> codec, tree, peer = ErrorFeedback(TopK(0.5)), {"w": torch.tensor([3.0, 2.0])}, Peer(Key(0))
    >>> first, state = codec.encode(tree, codec.init(Spec.of(tree)), peer)
    >>> second, _ = codec.encode(tree, state, peer)
    >>> [codec.decode(data, Spec.of(tree), peer)["w"].tolist() for data in (first, second)]
    [[3.0, 0.0], [0.0, 4.0]]

    The error e is state of the sender, as large as the update and kept between its rounds. Blocks that are not
    synchronized in a round keep their error.

    Not for codecs whose error can be larger than their input, such as `qsgd` with few bits: e would grow.
    """

    inner: Codec = Raw()
    decay: Share = rare(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.unbiased:
            raise ConfigError(
                f"{type(self.inner).__name__} scales values up to be unbiased, so its error would grow under error "
                "feedback; write unbiased = False"
            )

    def init(self, spec: Spec) -> Tree:
        """Zero errors for all blocks."""
        common_type(spec)  # raises a ConfigError for blocks that are not floating point
        return {_REST + name: block for name, block in spec.zeros().items()}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The payload of the inner codec for x + decay e, and the new error."""
        kept = {name: state[_REST + name].cpu() for name in tree}
        if self.decay < 1:
            kept = {name: self.decay * block for name, block in kept.items()}
        wanted = {name: block.detach().cpu() + kept[name] for name, block in tree.items()}
        data, _ = self.inner.encode(wanted, {}, peer)
        decoded = self.inner.decode(data, Spec.of(wanted), peer)
        return data, {**state, **{_REST + name: wanted[name] - decoded[name] for name in wanted}}
