"""`thinwire run`, `resume`, `watch` and `export`: train, and what a run directory is for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live

from thinwire.cli.options import AsJson, DataDir, Log, Method, Quiet, RunDirectory, Task, documented, verb
from thinwire.cli.terminal import note, out as console, print_json, show_facts
from thinwire.core.text import human_bytes, visible
from thinwire.errors import ConfigError
from thinwire.runs.progress import shown as progress, style_of

if TYPE_CHECKING:
    from thinwire.federation.job import RoundRecord
    from thinwire.federation.settings import Settings
    from thinwire.runs.run_directory import Summary
    from thinwire.runs.watch import Standing

TRAINING_FAILED = 3  # exit code of training that diverged, collapsed or ended at chance


@verb()
def run(
    what: Method,
    on: Task = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Train, and write a run directory, by default under runs/; a finished run is used again.

    Example: thinwire run fedavg --on digits --rounds 20 --set method.client_opt.lr=0.05

    Methods that set different parts of a round can be combined: thinwire run fedpara+scaffold+int8

    End early, and keep the best model: thinwire run fedavg --rounds 200 --patience 10 --keep-best
    """
    from thinwire.runs.execute import default_folder, execute
    from thinwire.runs.run import settings_of

    settings = settings_of(what, on, options)
    path = options["out"] or default_folder(settings)
    with shown(settings, path, options["log"], quiet) as on_round:
        how = {"data_dir": options["data_dir"], "overwrite": bool(options["overwrite"])}
        summary = execute(settings, path, on_round=on_round, **how)
    show_summary(summary, path, as_json)


@documented
def resume(
    run: RunDirectory,
    number: Annotated[
        int | None,
        typer.Option("--from", metavar="ROUND", help="Go back to the checkpoint of this round; 0: the start."),
    ] = None,
    rounds: int | None = None,
    data_dir: DataDir = None,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue an interrupted run from its last checkpoint; the result is the same as without interruption.

    Example: thinwire resume runs/fedavg-digits-s0-1a2b3c

    Give a finished run more rounds: thinwire resume RUN --rounds 200

    Go back to the checkpoint of a round, give up the rounds after it, and continue: thinwire resume RUN --from 20

    Options:
        rounds: Number of rounds in all. Schedules go on as in a run of that many rounds.
    """
    from thinwire.runs.execute import execute
    from thinwire.runs.retry import roll_back
    from thinwire.runs.run_directory import RunFolder

    if number is not None:
        back = roll_back(run, number)
        where, lost = f"round {number}" if number else "the start", back.round - number
        note(f"{run} is back at {where}: {lost} rounds and {human_bytes(back.bytes_abandoned)} given up")
    settings = RunFolder.open(run).experiment
    if rounds is not None:
        settings = extended(settings, rounds, run)
    runner: Callable[..., Summary] = execute
    how: dict[str, Any] = {"data_dir": data_dir, "resume": True}
    if (run / "deployment.json").is_file():
        if rounds is not None:
            raise ConfigError(
                f"{run} is a deployment, whose clients know its {settings.rounds} rounds; leave out --rounds"
            )
        from thinwire.flower.local import deploy as runner
        from thinwire.runs.files import read_json
        from thinwire.runs.watch import how_to_resume

        deployment = {key: value for key, value in read_json(run / "deployment.json").items() if key != "run"}
        how |= {"nodes": deployment.pop("nodes", 0), "settings": deployment}
        if not how["nodes"]:
            line = f"{run} was started with `flwr run`; {how_to_resume(run, {})}"
            if number is None:
                raise ConfigError(line)
            print(visible(line))
            return
    elif not quiet:
        new = f"has no checkpoint yet: from round 1 of {settings.rounds}"
        how["on_continue"] = lambda done: note(
            f"{run} goes on after round {done} of {settings.rounds}" if done else f"{run} {new}"
        )
    with shown(settings, run, log, quiet) as on_round:
        summary = runner(settings, run, on_round=on_round, **how)
    show_summary(summary, run, as_json)


def extended(settings: Settings, rounds: int, run: Path) -> Settings:
    """The settings with more rounds."""
    if rounds < settings.rounds:
        raise ConfigError(
            f"{run} has {settings.rounds} rounds already; write --rounds {2 * settings.rounds}, or leave it"
        )
    if rounds == settings.rounds:
        return settings
    return replace(settings, rounds=rounds, extended=(*settings.extended, settings.rounds))


@contextmanager
def shown(settings: Settings, path: Path, log: str | None, quiet: bool) -> Iterator[Callable[[RoundRecord], None]]:
    """Show the progress of a run, and log it to a tracker; yields a function to call with each record."""
    from thinwire.runs.trackers import tracker

    try:
        with (
            progress(settings.name, settings.rounds, style_of(not quiet)) as show_round,
            tracker(log, path) as log_round,
        ):

            def on_round(record: RoundRecord) -> None:
                show_round(record)
                log_round(record)

            yield on_round
    except KeyboardInterrupt:
        note(f"stopped; `thinwire resume {path}` continues it")
        sys.exit(130)


def show_summary(summary: Summary, path: Path, as_json: bool) -> None:
    """Print the totals of a run; exit with 3 if it failed."""
    print_json(summary) if as_json else show_facts(summary, str(path))
    exit_if_failed({str(path): summary})


def exit_if_failed(summaries: Mapping[str, Summary]) -> None:
    """Print one line for each run that diverged, collapsed or ended at chance; exit with 3 if there is one."""
    from thinwire.runs.collapse import is_broken

    failed = {path: summary for path, summary in summaries.items() if is_broken(summary)}
    for path, summary in failed.items():
        note(f"thinwire: {path} {summary['status']}: {summary['status_why']}")
    if failed:
        sys.exit(TRAINING_FAILED)


@documented
def export(run: RunDirectory, folder: Path, push: str | None = None, data_dir: DataDir = None) -> None:
    """Export the model of a run with a model card: a peft adapter, a transformers checkpoint, or a state dict.

    Example: thinwire export runs/lora-text-classification-s0-1a2b3c my-adapter

    Example: thinwire export runs/mapo-digits-s0-1a2b3c my-model --push me/mapo-digits

    Options:
        folder: Folder of the model.
        push: Also upload it to this repository of the Hugging Face hub.
    """
    from thinwire.runs.run import reopen

    found = reopen(run, data_dir)
    for file in found.save_pretrained(folder):
        print(visible(str(file)))
    if push:
        print(visible(found.push_to_hub(push)))


@documented
def watch(
    run: Path,
    once: bool = False,
    every: float = 1.0,
    as_json: AsJson = False,
    prometheus: Path | None = None,
) -> None:
    """Follow the progress of a run in another terminal or on a mounted disk, until it ends.

    The exit code is 1 if the process of the run is gone and the run is not finished.

    Example: thinwire watch runs/fedavg-digits-s0-1a2b3c

    Options:
        run: Run directory; it is only read.
        once: Print the state once and exit.
        every: Seconds between two reads of the files.
        prometheus: Also write a text file for Prometheus.
    """
    from thinwire.runs.watch import follow, standing, status_line

    last: Standing | None = None
    try:
        with Live(console=console) if console.is_terminal and not as_json else nullcontext() as live:
            for status in [standing(run)] if once else follow(run, every):
                if prometheus:
                    _write_prometheus(status, prometheus)
                if as_json:
                    print(json.dumps(status._asdict()), flush=True)
                elif live:
                    live.update(status_line(status))
                elif last is None or (status.round, status.state) != (last.round, last.state):
                    console.print(status_line(status), soft_wrap=True)
                last = status
    except KeyboardInterrupt:
        sys.exit(130)
    if last and last.state == "stopped" and not once:
        sys.exit(1)


def _write_prometheus(status: Standing, file: Path) -> None:
    """Write the state of a run and of its sites to a file, in the text format of Prometheus."""
    from thinwire.runs.deployment_records import by_site
    from thinwire.runs.files import write_atomically

    def label(**named: str) -> str:
        return ",".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in named.items())

    rows = list[tuple[str, str, Any]]()
    for name in ("round", "loss", "accuracy", "bytes_up", "bytes_down", "bytes_catchup"):
        rows.append((name, label(run=status.run), getattr(status, name)))
    for site, values in by_site(Path(status.run)).items():
        rows += [(f"site_{name}", label(run=status.run, site=site), value) for name, value in values.items()]
    lines = (f"thinwire_{name}{{{labels}}} {float(value)}\n" for name, labels, value in rows if value is not None)
    write_atomically(file, "".join(lines).encode())
    file.chmod(0o644)  # another user's exporter reads it
