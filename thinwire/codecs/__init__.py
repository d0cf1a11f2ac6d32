"""Codecs: encode a tree of tensors as bytes (quantization, sparsification, error feedback) and decode it again."""

from thinwire.codecs.base import Codec as Codec, Peer as Peer, Raw as Raw
from thinwire.codecs.binary import Binary as Binary
from thinwire.codecs.by_block import ByBlock as ByBlock
from thinwire.codecs.chain import Chain as Chain, ErrorFeedback as ErrorFeedback
from thinwire.codecs.eden import Eden as Eden
from thinwire.codecs.lattice import Lattice as Lattice, LatticeSum as LatticeSum
from thinwire.codecs.power_sgd import PowerSGD as PowerSGD, RankSlice as RankSlice
from thinwire.codecs.quantize import Quantize as Quantize
from thinwire.codecs.sparse import Masked as Masked, RandomK as RandomK, Threshold as Threshold, TopK as TopK
