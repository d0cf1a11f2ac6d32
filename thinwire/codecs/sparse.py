"""Former place of the sparse codecs: see topk.py, threshold.py, random_k.py, masked.py and core/selection.py."""

from thinwire.codecs.masked import Masked as Masked
from thinwire.codecs.random_k import RandomK as RandomK
from thinwire.codecs.threshold import Threshold as Threshold
from thinwire.codecs.topk import TopK as TopK
from thinwire.core.selection import kept as kept
from thinwire.core.selection import largest as largest
