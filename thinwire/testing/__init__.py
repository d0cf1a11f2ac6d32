"""What the author of a part runs on it: each check asks whether a part keeps its contract, and says where it does not.

    check_space   check_sketch   check_schedule   check_codec   check_optimizer   check_correction   check_privacy
    check_lr_schedule    check_aggregator

A check returns nothing, or raises an AssertionError that says what was expected. It needs no test framework, no data
and about a second. All of them also ask that a part is its own configuration: a frozen dataclass, equal by value, whose
repr evaluates to an equal part; and that it draws randomness from the key that it is given and from nowhere else.

>>> from thinwire.spaces import Full
>>> check_space(Full())
"""

from thinwire.testing.aggregation import check_aggregator as check_aggregator
from thinwire.testing.aggregation import check_privacy as check_privacy
from thinwire.testing.aggregation import check_schedule as check_schedule
from thinwire.testing.aggregation import check_sketch as check_sketch
from thinwire.testing.codecs import check_codec as check_codec
from thinwire.testing.optimizers import check_correction as check_correction
from thinwire.testing.optimizers import check_lr_schedule as check_lr_schedule
from thinwire.testing.optimizers import check_optimizer as check_optimizer
from thinwire.testing.spaces import check_space as check_space
