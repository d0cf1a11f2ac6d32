"""Chapter about the sites of a deployment: how often each was accepted, and what it sent."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.units import human_bytes
from thinwire.experiments.records import Recorded
from thinwire.experiments.site_records import SiteTotals, read_sites, totals_by_site
from thinwire.reports.page import Chapter, Piece, Table
from thinwire.reports.seed_groups import SeedGroup

MOST_SITES = 50
HEADS = ("site", "accepted", "bounded", "refused", "absent", "late", "norm", "cosine", "loss", "seconds", "up", "down")


def sites_chapter(groups: Sequence[SeedGroup]) -> Chapter | None:
    """A table of the sites of each deployed run; None if no run was deployed."""
    pieces: list[Piece] = []
    for group in groups:
        for run in group.runs:
            if totals := totals_by_site(read_sites(run.path)):
                pieces += _tables(f"{group.label}, seed {run.table.get('seed', 0)}", run, totals)
    if not pieces:
        return None
    words = (
        "Counts are rounds, those that were given up included. Norm of the update, its cosine to the mean of the "
        "round, training loss and seconds until the response are medians; bytes are sums."
    )
    return Chapter("Sites", [words, *pieces])


def _tables(name: str, run: Recorded, totals: Sequence[SiteTotals]) -> list[Piece]:
    """The table of one run, its most troublesome sites first, and the reasons."""
    ordered = sorted(totals, key=lambda one: -(one.counts["refused"] + one.counts["bounded"]))[:MOST_SITES]
    more = f", {MOST_SITES} of {len(totals)} sites" if len(totals) > MOST_SITES else ""
    pieces: list[Piece] = [Table(f"Sites of {name}{more}", HEADS, [site_cells(one) for one in ordered])]
    if reasons := [(one.site, one.why) for one in ordered if one.why]:
        pieces.append(Table(f"Newest reason of each site, {name}", ("site", "reason"), reasons, folded=True))
    return pieces


def site_cells(totals: SiteTotals) -> tuple[str, ...]:
    """The row of one site.

    >>> counts = {"accepted": 9, "bounded": 0, "refused": 1, "absent": 0, "late": 0}
    >>> site_cells(SiteTotals("north", counts, 0.5, 0.91, 0.25, 1.5, 2000, 4000, ""))[5:]
    ('0', '0.5', '0.91', '0.25', '1.5', '2 kB', '4 kB')
    """
    numbers = (totals.norm, totals.cosine, totals.loss, totals.seconds)
    return (
        totals.site,
        *(f"{count:,}" for count in totals.counts.values()),
        *("-" if value is None else f"{value:.3g}" for value in numbers),
        human_bytes(totals.bytes_up),
        human_bytes(totals.bytes_down),
    )
