"""Last chapters of a page: settings, machines, commands to repeat the runs, and definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.core.text import visible
from thinwire.experiments.link_time import JOULES_PER_BYTE, energy
from thinwire.reports.formatting import setting_text
from thinwire.reports.page import Chapter, Command, Piece, Table
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.settings import differing, flat


def settings_chapter(groups: Sequence[SeedGroup]) -> Chapter:
    """Settings that differ, settings that are shared, and the machines."""
    configs = [flat(group.config) for group in groups]
    paths = [path for path in differing([group.config for group in groups]) if path != "name"]
    shared = {path: value for path, value in configs[0].items() if path not in paths and path != "name"}
    pieces: list[Piece] = []
    if paths:
        first = configs[0]
        rows = []
        for group, config in zip(groups, configs, strict=True):
            shown = [path for path in paths if path in config and (config is first or config[path] != first.get(path))]
            rows.append([group.label, "; ".join(f"{path} = {setting_text(config[path])}" for path in shown)])
        caption = f"Settings that differ; for other methods than {groups[0].label}, the differences from it"
        pieces.append(Table(caption, ("method", "settings"), rows))
    rows = [[path, setting_text(value)] for path, value in shared.items()]
    pieces.append(Table("Shared settings", ("key", "value"), rows, folded=True))
    machines: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            labels = machines.setdefault(_environment_text(run.environment), [])
            if group.label not in labels:
                labels.append(group.label)
    rows = [[", ".join(labels), machine] for machine, labels in machines.items()]
    pieces.append(Table("Machines", ("methods", "machine and versions"), rows))
    return Chapter("Settings and machines", pieces)


def _environment_text(environment: dict[str, Any]) -> str:
    if not environment:
        return "not recorded"
    machine = environment.get("gpu") or environment.get("machine", "?")
    parts = [f"{environment.get('system', '?')} on {machine}", f"{environment.get('threads', '?')} threads"]
    parts += [f"device {environment['device']}"] if environment.get("device") else []
    parts += [f"clients trained by {environment['clients_trained_by']}"] if "clients_trained_by" in environment else []
    parts += [f"Python {environment.get('python', '?')}"]
    versions = environment.get("versions")
    parts += [f"{name} {version}" for name, version in (versions if isinstance(versions, dict) else {}).items()]
    return ", ".join(parts)


def commands_chapter(groups: Sequence[SeedGroup]) -> Chapter:
    """One command per run that repeats it."""
    from thinwire.reports.rerun import rerun  # needs torch, which the rest of the page does not

    commands = dict.fromkeys(visible(rerun(run.table, run.path), 10_000) for group in groups for run in group.runs)
    text = "Each command repeats one run with exactly these settings."
    return Chapter("Commands", [text, Command("\n".join(commands))])


def definitions_chapter(compute: float | None, joules_per_byte: float) -> Chapter:
    """Definitions of bytes, intervals, time and energy.

    Args:
        compute: training seconds of a client per round, if given.
        joules_per_byte: of the energy model.
    """
    seconds = (
        "the measured seconds of the round divided by its number of clients, since one machine simulates all of them"
        if compute is None
        else f"{compute:g} s per round, as given"
    )
    megabyte = energy(1e6, joules_per_byte)
    constant = " (0.1 kWh per gigabyte, an estimate for mobile networks)" if joules_per_byte == JOULES_PER_BYTE else ""
    return Chapter(
        "Definitions",
        [
            "Bytes are lengths of encoded messages: uploads (up), downloads to clients that took part in the previous "
            "round (down), and what clients downloaded in addition because they had missed rounds (catch-up). Total is "
            "the sum of all three and of rounds that were abandoned when a run went back (abandoned); ideal leaves out "
            "catch-up and abandoned rounds.",
            "Curves and totals are means over runs that differ only in their seed. The 95 % interval is that of the "
            "mean over seeds by Student's t; with few seeds it is wide.",
            "Time of a round = compute + 8 × bytes up of a client / upload speed + 8 × bytes down and catch-up of a "
            "client / download speed. Clients work in parallel on equal links, and the bytes of a client are those of "
            f"the round divided by its number of clients. Compute is {seconds}. Latency and stragglers are not "
            "modeled. FedPara's Tables 7 and 8 use this formula.",
            f"Energy = {megabyte:.3g} J per megabyte × total bytes{constant}, the form of the user-to-data-center "
            "model that FedPara uses, in which device, access network, core and data center each cost some joules per "
            "byte. FedPara prints no constant, and estimates differ by more than a factor of ten, so only ratios are "
            "meaningful; they equal the ratios of bytes. Training is not included.",
        ],
    )
