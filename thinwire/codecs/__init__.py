"""Codecs: encode a tree of tensors as bytes (quantization, sparsification, error feedback) and decode it again."""

from thinwire.codecs.base import Codec as Codec
from thinwire.codecs.base import Peer as Peer
from thinwire.codecs.base import Raw as Raw
from thinwire.codecs.by_block import ByBlock as ByBlock
from thinwire.codecs.chain import Chain as Chain
from thinwire.codecs.eden import Eden as Eden
from thinwire.codecs.error_feedback import ErrorFeedback as ErrorFeedback
from thinwire.codecs.lattice import Lattice as Lattice
from thinwire.codecs.lattice import LatticeSum as LatticeSum
from thinwire.codecs.masked import Masked as Masked
from thinwire.codecs.on_lattice import OnLattice as OnLattice
from thinwire.codecs.power_sgd import PowerSGD as PowerSGD
from thinwire.codecs.quantize import Quantize as Quantize
from thinwire.codecs.random_k import RandomK as RandomK
from thinwire.codecs.rank_slice import RankSlice as RankSlice
from thinwire.codecs.threshold import Threshold as Threshold
from thinwire.codecs.topk import TopK as TopK
