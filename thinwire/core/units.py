"""Human-readable quantities: bytes, fractions, seconds, joules."""

from __future__ import annotations

import re

from thinwire.core.text import visible
from thinwire.errors import ConfigError


def human_bytes(count: float) -> str:
    """Format a number of bytes, in powers of 1000. The inverse is `read_bytes`.

    >>> human_bytes(999), human_bytes(1500), human_bytes(2.5e9)
    ('999 B', '1.5 kB', '2.5 GB')
    """
    return f"{count:.0f} B" if count < 1000 else _scaled(count / 1000, ("kB", "MB", "GB", "TB"))


def read_bytes(text: str) -> int:
    """Parse a number of bytes such as 500MB, in powers of 1000. The inverse is `human_bytes`.

    >>> read_bytes("500MB"), read_bytes("1.5 kB"), read_bytes("1000")
    (500000000, 1500, 1000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"a number of bytes is written as 500MB or 2 GB, not {text!r}")
    count = float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " ")
    if count >= 1 << 63:
        raise ConfigError(f"a number of bytes has at most 63 bits, not {visible(text, 40)!r}")
    return int(count)


def human_joules(count: float) -> str:
    """Format an energy.

    >>> human_joules(0.25), human_joules(12.3), human_joules(360_000)
    ('0.25 J', '12.3 J', '360 kJ')
    """
    return _scaled(count, ("J", "kJ", "MJ", "GJ", "TJ"))


def human_seconds(count: float) -> str:
    """Format a duration.

    >>> human_seconds(0.034), human_seconds(59), human_seconds(125), human_seconds(9000), human_seconds(200_000)
    ('0.034 s', '59 s', '2.08 min', '2.5 h', '2.31 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} s"


def percent(fraction: float | None) -> str:
    """Format a fraction.

    >>> percent(0.9312), percent(None)
    ('93.12 %', '-')
    """
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def _scaled(count: float, units: tuple[str, ...]) -> str:
    for unit in units:
        if count < 999.5 or unit == units[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"
