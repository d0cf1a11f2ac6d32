"""Layer 1. Numbers to bytes: codecs, and the message that carries them."""

from thinwire.codecs.base import Codec as Codec
from thinwire.codecs.base import Peer as Peer
from thinwire.codecs.base import Raw as Raw
