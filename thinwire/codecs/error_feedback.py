"""Error feedback: add the compression error of one message to the next.

Papers: Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.codecs.base import Codec, Peer, Raw, check_fits, refuse_stateful
from thinwire.core.registry import register, short_repr
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import common_type
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes

_REST = "rest/"


@register("codec", "error-feedback", paper="Karimireddy et al., ICML 2019")
@dataclass(frozen=True)
class ErrorFeedback(Codec):
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
    decay: float = field(default=1.0, metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay must be above 0 and at most 1, not {self.decay}; write 1.0 to lose nothing")
        refuse_stateful(self, self.inner)
        if self.inner.unbiased:
            raise ConfigError(
                f"{type(self.inner).__name__} scales values up to be unbiased, so its error would grow under error "
                "feedback; write unbiased = False"
            )

    @property
    def summable(self) -> bool:
        """As the inner codec: earlier errors are part of the values."""
        return self.inner.summable

    def check(self, spec: Spec) -> None:
        """Check the inner codec."""
        check_fits(self.inner, spec)

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

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """As the inner codec."""
        return self.inner.decode(data, spec, peer)

    def size(self, spec: Spec) -> int | None:
        """As the inner codec."""
        return self.inner.size(spec)
