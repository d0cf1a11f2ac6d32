"""Privacy mechanisms: differential privacy, and secure aggregation by pairwise masks."""

from thinwire.privacy.base import MaskedPrivacy as MaskedPrivacy
from thinwire.privacy.base import NoPrivacy as NoPrivacy
from thinwire.privacy.base import Privacy as Privacy
from thinwire.privacy.dp import DP as DP
