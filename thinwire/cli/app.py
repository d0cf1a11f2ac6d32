"""The command line: verbs only. Torch and everything that needs it are imported when a verb runs."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.core.text import visible
from thinwire.errors import CheckpointError, ConfigError, Diverged, ThinwireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from thinwire.experiments.config import Experiment
    from thinwire.experiments.run_directory import Summary
    from thinwire.runtime.job import RoundRecord

UsageError: Any = typer.BadParameter.__base__  # of click, which newer versions of typer carry inside
TOUR = ("fedavg", "mapo", "fedpara", "sparse", "fedlama", "thin")  # of these, `compare` alone runs those that exist

FAILED = 3  # the exit code of training that diverged, collapsed or ended at chance

app = typer.Typer(
    name="thinwire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Much learning over a thin link: federated learning that counts the bytes it really sends.\n\n"
    "Example: [bold]thinwire compare fedavg mapo mapo+int8 --on digits[/bold]",
)

Method = Annotated[
    str,
    typer.Argument(metavar="METHOD_OR_FILE", help="A method (`thinwire list`), several joined by +, or a .toml file."),
]
On = Annotated[str | None, typer.Option("--on", metavar="TASK", help="The task (`thinwire list tasks`).")]
Rounds = Annotated[int | None, typer.Option(help="How many rounds.")]
Clients = Annotated[int | None, typer.Option(help="How many clients there are.")]
CohortSize = Annotated[int | None, typer.Option("--cohort", help="How many clients take part in a round.")]
Seed = Annotated[int | None, typer.Option(help="The root of all randomness.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Account = Annotated[
    str | None,
    typer.Option(
        "--accounting", help="Which bytes count in totals: honest (all) or ideal (no catch-up, as in papers)."
    ),
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key; may be repeated.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="THINWIRE_DATA", help="The folder that holds the data sets.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Log = Annotated[
    str | None,
    typer.Option("--log", metavar="TRACKER", help="Also tell a tracker: tensorboard (into the run directory)."),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts and tables.")]
Target = Annotated[
    list[float] | None,
    typer.Option("--target", metavar="ACCURACY", help="What to reach, such as 0.8; may be repeated."),
]
Again = Annotated[bool, typer.Option("--again", help="Run anew although this very run was done before.")]


@app.command()
def run(
    what: Method,
    on: On = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    accounting: Account = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run directory (by default one under runs/).")] = None,
    data_dir: DataDir = None,
    log: Log = None,
    again: Again = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train, and write a run directory.

    Example: thinwire run fedavg --on digits --rounds 20 --set method.client_opt.lr=0.05

    Methods that fill different slots may be joined: thinwire run fedpara+scaffold+int8
    """
    from thinwire.experiments.execute import default_folder

    experiment = _resolve(what, on, rounds, clients, cohort, seed, device, set_, accounting)
    _execute(experiment, out or default_folder(experiment), data_dir, log, as_json, quiet, again=again)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    data_dir: DataDir = None,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed, exactly where it was.

    Example: thinwire resume runs/fedavg-digits-s0-1a2b3c
    """
    from thinwire.experiments.run_directory import RunFolder

    experiment = RunFolder.open(run).experiment
    if (run / "deployment.json").is_file():
        from thinwire.deployment.apps import deployment

        known = deployment(run) or {}
        if not (nodes := known.pop("nodes", 0)):
            raise ConfigError(f"{run} was deployed by hand; `flwr run` its app again to go on, with the same run-dir")
        settings = {key: value for key, value in known.items() if key != "run"}
        _execute(experiment, run, data_dir, log, as_json, quiet, _deployed(nodes, settings), resume=True)
    else:
        _execute(experiment, run, data_dir, log, as_json, quiet, resume=True)


@app.command()
def deploy(
    what: Method,
    on: On = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes; without --clients also how many clients.")] = 4,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    set_: Set = None,
    seconds: Annotated[float, typer.Option(help="How long the server waits for answers.")] = 600.0,
    quorum: Annotated[float, typer.Option(help="The share of the cohort that must answer.")] = 0.5,
    out: Annotated[Path | None, typer.Option(help="The run directory (by default one under runs/).")] = None,
    data_dir: DataDir = None,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run between real processes on this machine, over Flower with TLS, and take everything down again.

    Example: thinwire deploy fedavg --on digits --nodes 4 --rounds 5
    """
    from thinwire.experiments.config import resolve
    from thinwire.experiments.execute import default_folder

    clients = nodes if clients is None else clients
    if cohort is None:
        cohort = min(clients, resolve(what, on).cohort.size)
    experiment = _resolve(what, on, rounds, clients, cohort, seed, None, set_)
    path = out or default_folder(experiment, Path("runs/deployed"))
    by = _deployed(nodes, {"seconds": seconds, "quorum": quorum})
    _execute(experiment, path, data_dir, log, as_json, quiet, by)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def node(context: typer.Context) -> None:
    """Run a Flower SuperNode that stays awake; its options are those of flower-supernode.

    Example: thinwire node --superlink server:8000 --root-certificates ca.pem --auth-supernode-private-key node-0
    """
    if context.args in ([], ["--help"]):
        context.get_help()  # prints it; `flower-supernode --help` tells the options
        return
    from thinwire.deployment.node import node as stay

    stay(context.args)


@app.command()
def adapter(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the adapter.")],
    data_dir: DataDir = None,
) -> None:
    """Write what a run trained with LoRA as an adapter that `peft.PeftModel.from_pretrained` loads.

    Example: thinwire adapter runs/lora-text-classification-s0-1a2b3c my-adapter
    """
    from thinwire.experiments.peft_export import adapter_of_run

    for file in adapter_of_run(run, folder, data_dir):
        print(visible(str(file)))


@app.command("app")
def app_(
    what: Method,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    on: On = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    set_: Set = None,
) -> None:
    """Write a Flower app that `flwr run` runs unchanged.

    Example: thinwire app mapo my-app --on digits --clients 4 --cohort 4
    """
    from thinwire.deployment.app_folder import write_app

    for file in write_app(_resolve(what, on, rounds, clients, cohort, seed, None, set_), folder):
        print(visible(str(file)))


@app.command()
def check(
    what: Method,
    on: On = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    set_: Set = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say whether an experiment can run and what it costs; train nothing.

    Example: thinwire check fedpara+scaffold --on digits
    """
    from thinwire.cli.terminal import show_facts
    from thinwire.experiments.check import check as check_experiment

    facts = check_experiment(_resolve(what, on, rounds, clients, cohort, seed, device, set_), data_dir)
    _print_json(facts) if as_json else show_facts(facts, "ready to run")


@app.command()
def repro(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help="Tables of the papers; none lists them, `all` is all."),
    ] = None,
    scale: Annotated[str, typer.Option(help="How much of the paper's work: quick, gpu or paper.")] = "quick",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    set_: Set = None,
    out: Annotated[Path, typer.Option(help="The folder of the run directories; finished runs are used again.")] = Path(
        "runs/repro"
    ),
    md: Annotated[
        Path | None, typer.Option("--md", metavar="FILE", help="Write a page, and the numbers of its runs beside it.")
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; show what is done.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make tables of the papers anew: our number, the paper's, the difference, and the bytes that were really sent.

    Example: thinwire repro mapo-3 --scale quick --set task.clients=20
    """
    from thinwire.cli.terminal import say_run, show_list, show_markdown
    from thinwire.experiments.presets import presets, tables

    if not names:
        _print_json(tables()) if as_json else show_list(tables())
        return
    from thinwire.experiments.grid import run_grids
    from thinwire.experiments.repro import load
    from thinwire.reports.repro_page import section, write_page

    wanted = list(presets("repro")) if names == ["all"] else names
    found = [load(name, scale, device, set_ or ()) for name in wanted]
    if not no_run:
        run_grids([one.grid for one in found], out, jobs, data_dir, lambda run: say_run(run, quiet))
    sections = [section(one, out, folder=md.stem if md else "") for one in found]
    if md:
        write_page(md, sections)
        _say_written(md)
    if as_json:
        _print_json({name: part._asdict() for name, part in zip(wanted, sections, strict=True)})
    elif not md:
        for part in sections:
            show_markdown(part.text)
    if not no_run and any(part.missing for part in sections):
        raise typer.Exit(1)


@app.command()
def tune(
    what: Method = "flasc",
    on: On = None,
    ranks: Annotated[str, typer.Option(metavar="R,R,...", help="Ranks to try, ascending.")] = "1,4,8",
    densities: Annotated[str, typer.Option(metavar="D,D,...", help="Densities to try, ascending.")] = "1/16,1/4,1",
    knob: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[+KEY]=V,V,...", help="Instead: any two settings whose product is what is sent."),
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="BYTES", help="Stop when so much was sent: 500MB.")] = None,
    validation_fraction: Annotated[
        float, typer.Option(metavar="SHARE", help="Of each client's examples, to choose by; 0 chooses by the test set.")
    ] = 0.1,
    out: Annotated[Path, typer.Option(help="The folder of the runs; what it holds is not run again.")] = Path("runs"),
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    set_: Set = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Find two settings by a few runs (FLASC-S: rank and density), and say what the search and a grid cost.

    Example: thinwire tune flasc --on digits --ranks 1,4,8 --densities 1/16,1/4,1 --budget 50MB
    """
    from thinwire.cli.terminal import show_facts
    from thinwire.core.units import read_bytes
    from thinwire.experiments.tune import Knob, flasc_knobs, numbers
    from thinwire.experiments.tune import tune as search

    experiment = _resolve(what, on, rounds, clients, cohort, seed, device, set_)
    if knob and len(knob) != 2:
        raise ConfigError(f"the search has two knobs, the size and the share; {len(knob)} were given")
    size, share = (
        (Knob.parse(knob[0]), Knob.parse(knob[1]))
        if knob
        else flasc_knobs(numbers(ranks, "ranks"), numbers(densities, "densities"))
    )
    limit = None if budget is None else read_bytes(budget)
    found = search(
        experiment, size, share, budget=limit, out=out, data_dir=data_dir, validation_fraction=validation_fraction
    )
    facts: dict[str, Any] = {size.label: found.size, share.label: found.share, "chosen_by": found.chosen_by}
    facts |= {"bytes_total": found.bytes, "bytes_of_a_grid": found.grid, "stopped": found.stopped}
    if as_json:
        pairs = [[one._asdict() for one in pair] for pair in found.compared]
        _print_json({**facts, "tried": [one._asdict() for one in found.tried], "compared": pairs})
        return
    for one in found.tried:
        test = "" if one.test_accuracy is None else f", on the test set {one.test_accuracy:.4f}"
        told = f"accuracy {one.accuracy:.4f}{test}, {one.bytes:,} bytes"
        facts[f"{size.label} {one.size:g}, {share.label} {one.share:g}"] = told
    for low, high in found.compared:
        words = f"{size.label} {high.size:g}, {share.label} {high.share:g} against {low.size:g}, {low.share:g}"
        facts[words] = f"{high.bytes / low.bytes:.2f} times its bytes" if low.bytes else "-"
    facts["stopped"] = "by the budget: the best so far" if found.stopped else "when it was done"
    show_facts(facts, "the search")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, tasks, models, splits or parts.")] = "methods",
    as_json: AsJson = False,
) -> None:
    """List what there is, one line each. Methods may be joined by +, as in mapo+int8.

    Example: thinwire list models --json
    """
    from thinwire.cli.terminal import show_list
    from thinwire.experiments.catalog import catalog

    items = catalog(what)
    _print_json(items) if as_json else show_list(items)


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="METHOD_FILE_OR_RUN", help="As for run, or a finished run directory.")],
    on: On = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    set_: Set = None,
    plot: Annotated[Path | None, typer.Option(help="Of a run: draw its layers into this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a whole experiment as TOML, ready to copy and change; of a run, its totals and how often each layer spoke.

    Example: thinwire show fedpara+scaffold --on mnist > my.toml

        Example: thinwire show runs/fedlama-digits-s0-1a2b3c --plot layers.svg
    """
    from thinwire.experiments.config import to_table
    from thinwire.experiments.toml import dumps

    if (Path(what) / "config.toml").is_file():
        _show_run(Path(what), plot, as_json)
    elif plot:
        raise ConfigError(f"--plot draws a run directory, and {what} is not one")
    else:
        table = to_table(_resolve(what, on, rounds, clients, cohort, seed, device, set_))
        _print_json(table) if as_json else print(dumps(table), end="")


@app.command()
def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(metavar="METHOD...", help="Methods, also joined by +, or .toml files.")
    ] = None,
    on: On = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed upwards.")] = 1,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    accounting: Account = None,
    set_: Set = None,
    out: Annotated[Path, typer.Option(help="The folder of the run directories; finished runs are used again.")] = Path(
        "runs"
    ),
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="The page with charts and tables (by default compare.html in --out)."
        ),
    ] = None,
    target: Target = None,
    data_dir: DataDir = None,
    again: Again = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same clients and batches: one table, one page; with no method, a tour of them.

    Example: thinwire compare fedavg mapo mapo+int8 fedpara+scaffold --on digits --seeds 3 --html page.html
    """
    from thinwire.cli.terminal import progress, show_comparison
    from thinwire.experiments.execute import default_folder, execute
    from thinwire.experiments.presets import presets
    from thinwire.experiments.records import read_run
    from thinwire.experiments.run_directory import RunFolder
    from thinwire.reports.compare import as_json as plain
    from thinwire.reports.compare import table
    from thinwire.reports.report import check_page
    from thinwire.reports.report import report as write_report

    check_page([html] if html else [], target or ())
    if not methods:
        known = presets("methods")
        methods = [name for name in TOUR if name in known]
    first = seed or 0
    experiments = [
        _resolve(method, on, rounds, clients, cohort, s, device, set_, accounting)
        for method in methods
        for s in range(first, first + seeds)
    ]
    summaries: dict[str, Summary] = {}
    for experiment in experiments:
        label = f"{experiment.name} seed {experiment.seed}"
        path = default_folder(experiment, out)
        with progress(label, experiment.rounds, quiet, experiment.accounting) as on_round:
            try:
                summary = execute(experiment, path, data_dir=data_dir, resume=True, again=again, on_round=on_round)
            except Diverged:  # one line of the table; the others go on
                summary = RunFolder(path, experiment).summary() or {}
        summaries[str(path)] = summary
    rows = table(list(summaries.values()))
    if as_json:
        _print_json(plain(rows))
    else:
        task = experiments[0].task
        size = f"{task.clients} clients, {experiments[0].rounds} rounds, {seeds} seed{'s' if seeds > 1 else ''}"
        show_comparison(rows, f"{task.kind}: {size}")
    page = html or out / "compare.html"
    if paths := [path for path in map(Path, summaries) if read_run(path).records]:
        write_report(paths, page, targets=target or ())
        _say_written(page)
    _exit_if_broken(summaries)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that hold some.")],
    html: Html = None,
    md: Annotated[Path | None, typer.Option("--md", metavar="FILE", help="Write its tables as Markdown.")] = None,
    target: Target = None,
    compute: Annotated[
        float | None, typer.Option(help="Seconds a client trains in a round, for times; measured by default.")
    ] = None,
    joules: Annotated[float | None, typer.Option(help="Joules a megabyte costs, for energies; 360 by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs that are there, running ones included: accuracy against bytes, time and energy to a target.

    Runs that differ by their seed only are one line.

    Example: thinwire report runs --html page.html --target 0.9
    """
    from thinwire.cli.terminal import show_comparison
    from thinwire.reports.compare import as_json as plain
    from thinwire.reports.compare import table
    from thinwire.reports.report import report as write_report
    from thinwire.reports.report import summaries

    lines = write_report(runs, html, md, targets=target or (), compute=compute, joules_per_megabyte=joules)
    rows = table(summaries(lines, compute))
    if as_json:
        _print_json(plain(rows))
    else:
        show_comparison(rows, ", ".join(dict.fromkeys(line.runs[0].task for line in lines)))
    for file in (html, md):
        if file:
            _say_written(file)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory; it is only read.")],
    once: Annotated[bool, typer.Option("--once", help="Say it once and return.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Look on while a run goes on in another terminal, or on another machine; ends when the run does.

    Example: thinwire watch runs/fedavg-digits-s0-1a2b3c
    """
    from thinwire.experiments.watch import follow, standing

    if once and as_json:
        _print_json(standing(run).as_json())
        return
    if as_json:
        for now in follow(run, every):
            print(json.dumps(now.as_json()), flush=True)
        return
    from thinwire.cli.terminal import watch_live

    try:
        watch_live([standing(run)] if once else follow(run, every))
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    """Run the command line; an error that was foreseen, or the system's, is one line and exit code 2 (training: 3)."""
    from thinwire.cli.terminal import note, refuse

    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack what is printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = note
            code = app(standalone_mode=False, prog_name="thinwire")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read what is printed has seen enough
        _drop_output()
        sys.exit(1)
    except Diverged as error:
        refuse(error)
        sys.exit(FAILED)
    except (ThinwireError, OSError) as error:
        if sys.stdout is sys.__stdout__:
            _drop_output()
        refuse(error)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            asked = error.ctx.command_path if error.ctx else "thinwire"
            refuse(ConfigError(f"{error.format_message()} (`{asked} --help` lists what there is)"))
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output() -> None:
    """Send what is still to be printed nowhere: where printing failed, it would fail again at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _resolve(
    what: str,
    on: str | None,
    rounds: int | None,
    clients: int | None,
    cohort: int | None,
    seed: int | None,
    device: str | None,
    set_: list[str] | None,
    accounting: str | None = None,
) -> Experiment:
    from thinwire.experiments.config import parse_overrides, resolve

    flags = {
        "rounds": rounds,
        "task.clients": clients,
        "cohort.size": cohort,
        "seed": seed,
        "engine.device": device,
        "accounting": accounting,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    return resolve(what, on, {**given, **parse_overrides(set_ or [])})


def _execute(
    experiment: Experiment,
    path: Path,
    data_dir: Path | None,
    log: str | None,
    as_json: bool,
    quiet: bool,
    by: Callable[..., Summary] | None = None,
    **how: Any,
) -> None:
    from thinwire.cli.terminal import err, progress, show_facts
    from thinwire.experiments.execute import execute
    from thinwire.experiments.trackers import tracker

    try:
        counted = experiment.accounting
        with progress(experiment.name, experiment.rounds, quiet, counted) as show, tracker(log, path) as tell:

            def on_round(record: RoundRecord) -> None:
                show(record)
                tell(record)

            summary = (by or execute)(experiment, path, data_dir=data_dir, on_round=on_round, **how)
    except KeyboardInterrupt:
        err.print(visible(f"stopped; `thinwire resume {path}` goes on"), soft_wrap=True)
        sys.exit(130)
    _print_json(summary) if as_json else show_facts(summary, str(path))
    _exit_if_broken({str(path): summary})


def _exit_if_broken(summaries: dict[str, Summary]) -> None:
    """One line for each run that diverged, collapsed or ended at chance, and then exit code 3."""
    from thinwire.experiments.collapse import is_broken

    for path, summary in summaries.items():
        if dead := summary.get("dead_adapters"):
            words = f"the mask has left {len(dead)} adapters dead, {dead[0]} among them: they can never change"
            print(f"thinwire: {path}: {words}", file=sys.stderr)
    wrong = {path: summary for path, summary in summaries.items() if is_broken(summary)}
    for path, summary in wrong.items():
        print(visible(f"thinwire: {path} {summary['status']}: {summary['status_why']}"), file=sys.stderr)
    if wrong:
        sys.exit(FAILED)


def _deployed(nodes: int, settings: dict[str, Any]) -> Callable[..., Summary]:
    """What runs an experiment between processes."""
    from functools import partial

    from thinwire.deployment.local import deploy as deploy_here

    return partial(deploy_here, nodes=nodes, settings=settings)


def _show_run(path: Path, plot: Path | None, as_json: bool) -> None:
    from thinwire.cli.terminal import show_facts, show_layers
    from thinwire.experiments.run_directory import RunFolder
    from thinwire.reports.layer_chart import draw_layers

    run = RunFolder.open(path)
    summary = run.summary()
    if summary is None:
        raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` goes on with it")
    run.verify()
    layers = summary.get("layers", [])  # not in runs of earlier versions
    if plot and not layers:
        raise CheckpointError(f"{path} was run by a version that did not count layers; run it --again to draw it")
    if plot:
        draw_layers(layers, summary["rounds"], f"{summary['method']} on {summary['task']}, {path.name}", plot)
    if as_json:
        _print_json(summary)
        return
    show_facts(summary, str(path))
    if layers:
        show_layers(layers, summary["rounds"])


def _say_written(file: Path) -> None:
    print(visible(f"wrote {file}"), file=sys.stderr)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
