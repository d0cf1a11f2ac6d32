"""Privacy mechanisms: differential privacy, and secure aggregation by pairwise masks."""

from thinwire.privacy.base import MaskedPrivacy as MaskedPrivacy, NoPrivacy as NoPrivacy, Privacy as Privacy
from thinwire.privacy.dp import DP as DP
