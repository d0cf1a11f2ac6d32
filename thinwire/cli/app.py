"""Entry point of the command line: assembles the verbs and turns errors into one line and an exit code.

No module that it imports loads torch; verbs import what they need when they run.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from thinwire.cli import deploy, run, search, show
from thinwire.cli.options import Imports
from thinwire.cli.terminal import note
from thinwire.errors import Diverged, ThinwireError
from thinwire.runs.files import message_of

UsageError: Any = typer.BadParameter.__base__  # newer versions of typer contain their own copy of click

app = typer.Typer(
    name="thinwire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Communication-efficient federated learning, measured in bytes of real messages.\n\n"
    "Example: [bold]thinwire compare fedavg mapo mapo+int8 --on digits[/bold]",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import thinwire

        print(f"thinwire {thinwire.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def global_options(imports: Imports = None, version: Version = False) -> None:
    """Options before the verb; `--import` and `--version` are handled by their callbacks."""


VERBS: tuple[Callable[..., None], ...] = (
    *(run.run, run.resume, show.check, show.show, search.compare, search.sweep, search.tune, search.report),
    *(run.watch, run.export, deploy.deploy, deploy.app),
)
for verb in VERBS:
    app.command()(verb)
app.command("list")(show.list_names)
app.add_typer(deploy.site, name="site")


def main(verbs: typer.Typer = app, name: str = "thinwire") -> None:
    """Run a command line and exit; `python -m papers` has verbs of its own.

    Exit codes: 0 done, 1 incomplete, 2 an expected error or one of the operating system (printed as one line),
    3 training diverged, collapsed or ended at chance, 130 interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters that are printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: note(f"thinwire: note: {message}")
            code = verbs(standalone_mode=False, prog_name=name)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        _drop_output()
        sys.exit(1)
    except Diverged as error:
        note(f"thinwire: {message_of(error)}")
        sys.exit(run.TRAINING_FAILED)
    except (ThinwireError, OSError) as error:
        if sys.stdout is sys.__stdout__:
            _drop_output()
        note(f"thinwire: {message_of(error)}")
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            command = error.ctx.command_path if error.ctx else "thinwire"
            note(f"thinwire: {error.format_message()} (see `{command} --help`)")
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output() -> None:
    """Discard buffered output: if writing failed once, flushing at exit would fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
