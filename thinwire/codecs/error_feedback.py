"""What a codec could not say this time is said later (error feedback).

Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs.base import Codec, Peer, Raw, check_fits
from thinwire.codecs.sparse import refuse_memory
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import common_type
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes

_REST = "rest/"


@register("codec", "error-feedback", paper="Karimireddy et al., ICML 2019")
@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Add to each message what the ones before it lost, so that nothing is lost for good.

        send C(x + e),    e <- x + e - C(x + e)

    Args:
        inner: the codec that loses something.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> from thinwire.codecs.sparse import TopK
    >>> codec, tree, peer = ErrorFeedback(TopK(0.5)), {"w": torch.tensor([3.0, 2.0])}, Peer(Key(0))
    >>> first, state = codec.encode(tree, codec.init(Spec.of(tree)), peer)
    >>> second, _ = codec.encode(tree, state, peer)
    >>> [codec.decode(data, Spec.of(tree), peer)["w"].tolist() for data in (first, second)]
    [[3.0, 0.0], [0.0, 4.0]]

    The memory is the sender's: as large as what it sends, kept between its rounds. Blocks that do not speak in a round
    keep theirs.

    Not for codecs that are off by more than what they are given, as `qsgd` with few bits is: their errors would grow.
    """

    inner: Codec = Raw()

    def __post_init__(self) -> None:
        refuse_memory(self, self.inner)
        if self.inner.unbiased:
            raise ConfigError(
                f"{type(self.inner).__name__} overshoots to be right on average, and what it overshoots by would grow "
                "in the memory of ErrorFeedback; write unbiased = False"
            )

    @property
    def summable(self) -> bool:
        """As the inner codec: what was lost before is part of the numbers."""
        return self.inner.summable

    def check(self, spec: Spec) -> None:
        """Ask the inner codec."""
        check_fits(self.inner, spec)

    def init(self, spec: Spec) -> Tree:
        """Nothing is lost yet."""
        common_type(spec)  # refuses what has no rest
        return {_REST + name: block for name, block in spec.zeros().items()}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The bytes of the inner codec, and what they do not say."""
        wanted = {name: block.detach().cpu() + state[_REST + name].cpu() for name, block in tree.items()}
        data, _ = self.inner.encode(wanted, {}, peer)
        said = self.inner.decode(data, Spec.of(wanted), peer)
        return data, {**state, **{_REST + name: wanted[name] - said[name] for name in wanted}}

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """What the inner codec says."""
        return self.inner.decode(data, spec, peer)

    def size(self, spec: Spec) -> int | None:
        """The size of the inner codec."""
        return self.inner.size(spec)
