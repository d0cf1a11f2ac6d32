"""Text for readers: untrusted text made safe to print, quantities with units, numbers given as text, the version.

Untrusted text (names, paths, errors of clients) is put on one line, bounded and without escape codes.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from html import escape
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError

LONGEST = 2000  # characters of an error message or a line of a log
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`|*[]"} | {"<": "&lt;"})


def visible(text: str, most: int = LONGEST) -> str:
    """The text on one line: characters that cannot be printed are escaped, long text is shortened in the middle.

    >>> visible("red: \\x1b[31m, two\\nlines, \\u202eturned"), visible("a" * 5000 + "z", 40)
    ('red: \\\\x1b[31m, two\\\\nlines, \\\\u202eturned', 'aaaaaaaa ... (5,001 characters) ... aaaz')
    """
    if len(text) > most:
        middle = f" ... ({len(text):,} characters) ... "
        end = max(0, most - len(middle)) * 2 // 5
        text = text[: max(0, most - len(middle) - end)] + middle + (text[-end:] if end else "")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown_text(text: str) -> str:
    """Escape text for Markdown, also in a table cell: no markup, no HTML, no end of cell or line.

    >>> markdown_text("a|b `c` <script> [x](y)")
    'a\\\\|b \\\\`c\\\\` &lt;script> \\\\[x\\\\](y)'
    """
    return visible(text, len(text)).translate(_MARKDOWN)


def html_text(text: str) -> str:
    """Escape text for HTML and SVG, including characters that HTML does not allow.

    >>> html_text("<b>\\x07")
    '&lt;b&gt;\\\\x07'
    """
    return escape(visible(text, len(text)))


def unfit_for_a_name(name: str, most: int) -> str:
    """Why a text cannot be used as a name, which is printed and becomes part of a file name; "" if it can.

    Args:
        name: the text.
        most: the largest number of bytes in UTF-8.

    >>> unfit_for_a_name("mapo+int8", 80), unfit_for_a_name("../x", 80), unfit_for_a_name("a\\x1b[0m", 80)
    ('', 'it begins with a dot', "it holds '\\\\x1b'")
    """
    if not name.strip():
        return "it is empty"
    if name.startswith("."):
        return "it begins with a dot"
    for character in name:
        if character in "/\\" or not character.isprintable():
            return f"it holds {character!r}"
    if (size := len(name.encode())) > most:
        return f"it has {size:,} bytes, more than {most}"
    return ""


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


PositiveInt = Annotated[int, "[1, inf)"]
NonNegativeInt = Annotated[int, "[0, inf)"]
PositiveFloat = Annotated[float, "(0, inf)"]
NonNegativeFloat = Annotated[float, "[0, inf)"]
Share = Annotated[float, "(0, 1]"]
Probability = Annotated[float, "[0, 1]"]
BelowOne = Annotated[float, "[0, 1)"]
ProperShare = Annotated[float, "(0, 1)"]
Classes = Annotated[int, "[2, inf)"]


def check_settings(part: Any, section: str = "") -> None:
    """Raise ConfigError for a field of a part with a value of the wrong type, or one that it cannot have.

    A field annotated `int` must hold a whole number, one annotated `float` a number, and one annotated with the name of
    a `Literal` one of its values. Numbers of numpy are numbers. A tensor is accepted for a float: recorded training has
    the learning rate in one. A type such as `Share` also has the interval of its values, as in mathematics: "(0, 1]" is
    above 0 and at most 1.

    Args:
        part: the part, a dataclass.
        section: where its fields are in a file, for messages: `checkpoint.`.

    >>> @dataclasses.dataclass
    ... class Sparse:
    ...     density: Share = 0.1
    ...     def __post_init__(self):
    ...         check_settings(self)
    >>> Sparse(0.0)
    Traceback (most recent call last):
    thinwire.errors.ConfigError: density must be above 0 and at most 1, not 0.0; write for example density = 0.1
    >>> Sparse("0.5")
    Traceback (most recent call last):
    thinwire.errors.ConfigError: density must be a number, not the text '0.5'; write density = 0.5
    """
    types = types_of(type(part))  # type: ignore[arg-type]
    for field in dataclasses.fields(part):
        check_value(section + field.name, getattr(part, field.name), types[field.name], field.default)


def check_value(name: str, value: Any, kind: Any, default: Any = None) -> None:
    """Raise ConfigError for a value that is not of a type as `check_settings` knows them; the default is an example.

    >>> check_value("classes", 0, PositiveInt)
    Traceback (most recent call last):
    thinwire.errors.ConfigError: classes must be 1 or more, not 0
    """
    interval = ""
    if get_origin(kind) is Annotated:
        kind, interval = get_args(kind)
    if wanted := _unmet(value, kind, interval):
        if isinstance(value, str) and value.replace(".", "").isdigit():
            raise ConfigError(f"{name} must be {wanted}, not the text {value!r}; write {name} = {value}")
        example = f"; write for example {name} = {default}" if isinstance(default, Real) else ""
        raise ConfigError(f"{name} must be {wanted}, not {value!r}{example}")


def _unmet(value: Any, kind: Any, interval: str) -> str:
    """What a value must be, if it is not."""
    if kind is int and not (isinstance(value, Integral) and not isinstance(value, bool)):
        return "a whole number"
    if kind is float and not (isinstance(value, Real) or hasattr(value, "dtype")):
        return "a number"
    if get_origin(kind) is Literal and value not in get_args(kind):
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if interval:
        low, high = map(float, interval[1:-1].split(","))
        above = value > low if interval[0] == "(" else value >= low
        if not (above and (value < high if interval[-1] == ")" else value <= high)):
            return _INTERVALS[interval[0] + (interval[-1] if high < float("inf") else "")].format(low, high)
    return ""


_INTERVALS = {
    "(": "above {0:g}",
    "[": "{0:g} or more",
    "()": "above {0:g} and below {1:g}",
    "(]": "above {0:g} and at most {1:g}",
    "[)": "at least {0:g} and below {1:g}",
    "[]": "from {0:g} to {1:g}",
}


@cache
def types_of(part: Any) -> dict[str, Any]:
    """The types of the fields of a class, or of the arguments of a function."""
    return get_type_hints(part, include_extras=True)


def version() -> str:
    """The version of the installed package; "unknown" in a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # late: it takes longer than the rest of thinwire

    try:
        return version("thinwire")
    except PackageNotFoundError:
        return "unknown"
