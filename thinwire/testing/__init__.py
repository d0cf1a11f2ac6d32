"""Conformance checks for authors of parts: each check tests whether a part fulfills its contract.

    check_space   check_sketch   check_schedule   check_codec   check_optimizer   check_correction   check_privacy
    check_lr_schedule    check_aggregator

A check returns nothing, or raises an AssertionError that names what was expected. It needs no test framework, no data
and about a second. Every check also tests that the part is a frozen dataclass, equal by value, whose repr evaluates to
an equal part, and that it draws random values only from the key that it is given.

>>> from thinwire.spaces import Full
>>> check_space(Full())
"""

from thinwire.testing.aggregation import (
    check_aggregator as check_aggregator,
    check_privacy as check_privacy,
    check_schedule as check_schedule,
    check_sketch as check_sketch,
)
from thinwire.testing.codecs import check_codec as check_codec
from thinwire.testing.training import (
    check_correction as check_correction,
    check_lr_schedule as check_lr_schedule,
    check_optimizer as check_optimizer,
    check_space as check_space,
)
