"""Layer 1. Numbers to bytes: codecs, and the message that carries them."""

from thinwire.codecs.base import Codec as Codec
from thinwire.codecs.base import Peer as Peer
from thinwire.codecs.base import Raw as Raw
from thinwire.codecs.by_block import ByBlock as ByBlock
from thinwire.codecs.chain import Chain as Chain
from thinwire.codecs.error_feedback import ErrorFeedback as ErrorFeedback
from thinwire.codecs.quantize import Quantize as Quantize
from thinwire.codecs.rank_slice import RankSlice as RankSlice
from thinwire.codecs.sparse import Masked as Masked
from thinwire.codecs.sparse import RandomK as RandomK
from thinwire.codecs.sparse import Threshold as Threshold
from thinwire.codecs.sparse import TopK as TopK
