"""Progress, warnings and errors of the command line: a progress bar in a terminal, plain lines in a file or pipe.

Names and paths are printed literally: brackets are not markup, and control characters are escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.core.text import visible
from thinwire.experiments.files import message_of
from thinwire.experiments.progress import Style, console_of, shown

if TYPE_CHECKING:
    from thinwire.runtime.job import RoundRecord

out, err = console_of(), console_of(stderr=True)


@contextmanager
def progress(
    label: str, rounds: int, quiet: bool = False, accounting: str = "honest"
) -> Iterator[Callable[[RoundRecord], None]]:
    """Show the progress of a run; yields a function to call after each round.

    Args:
        label: name of the run.
        rounds: number of rounds.
        quiet: show nothing.
        accounting: whether the bytes shown include catch-up downloads (`honest`) or not (`ideal`).
    """
    style: Style = "nothing" if quiet else "terminal" if err.is_terminal else "lines"
    with shown(label, rounds, style, accounting, err) as on_round:
        yield on_round


def print_start(run: Path, done: int, rounds: int) -> None:
    """Print the round from which a run goes on."""
    text = f"goes on after round {done} of {rounds}" if done else f"has no checkpoint yet: from round 1 of {rounds}"
    print(visible(f"{run} {text}"), file=sys.stderr)


def print_written(file: Path) -> None:
    """Print the name of a file that was written."""
    print(visible(f"wrote {file}"), file=sys.stderr)


def print_error(error: BaseException) -> None:
    """Print an error as one line."""
    print(f"thinwire: {visible(message_of(error))}", file=sys.stderr)


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line; replaces `warnings.showwarning`."""
    print(f"thinwire: note: {visible(str(message))}", file=sys.stderr)
