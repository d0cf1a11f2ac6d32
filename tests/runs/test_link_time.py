"""The network model against the arithmetic of FedPara's Tables 7 and 8."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError
from thinwire.runs.link_time import LINKS, seconds, seconds_by_link

# (compute, megabytes of the model, rounds to the target); the size follows from 470.2 s (47.2 s) at 2 Mbps
VGG16, FEDPARA = (1.64, 58.775, 112), (2.34, 5.9, 115)


def per_round(model, name):
    compute, size, _ = model
    record = {"clients": 1, "seconds": compute, "bytes_up": size * 1e6, "bytes_down": size * 1e6, "bytes_catchup": 0}
    return seconds([record], name)


@pytest.mark.parametrize(
    ("model", "name", "printed"),
    [
        (VGG16, "2 Mbps", 471.84),
        (VGG16, "10 Mbps", 94.68 + 1),  # printed as 94.68, but its two terms, 1.64 and 94.04, add up to 95.68
        (VGG16, "50 Mbps", 20.25 + 0.2),  # printed with 18.61 s of communication; a fifth of 94.04 is 18.81
        (FEDPARA, "2 Mbps", 49.54),
        (FEDPARA, "10 Mbps", 11.78),
        (FEDPARA, "50 Mbps", 4.22),
    ],
)
def test_seconds_a_round_are_those_of_table_7(model, name, printed):
    assert per_round(model, name) == pytest.approx(printed, abs=0.01)


@pytest.mark.parametrize(
    ("model", "name", "minutes"),
    [
        (VGG16, "2 Mbps", 880.77),
        (VGG16, "10 Mbps", 176.74 + 112 / 60),  # the misprint above, a second a round
        (VGG16, "50 Mbps", 37.80 + 0.2 * 112 / 60),
        (FEDPARA, "2 Mbps", 94.95),
        (FEDPARA, "10 Mbps", 22.58),
        (FEDPARA, "50 Mbps", 8.09),
    ],
)
def test_minutes_to_the_target_are_those_of_table_8(model, name, minutes):
    compute, size, rounds = model
    ten = {"clients": 10, "seconds": 10 * compute, "bytes_up": 10 * size * 1e6, "bytes_catchup": 0}
    records = [{**ten, "bytes_down": ten["bytes_up"]}] * rounds
    assert seconds(records, name) / 60 == pytest.approx(minutes, abs=0.02)


def test_catch_up_counts_as_download_and_a_slow_upload_link_affects_uploads_only():
    record = {"clients": 4, "seconds": 2.0, "bytes_up": 800, "bytes_down": 300, "bytes_catchup": 100}
    still = {**record, "seconds": 0.0}
    assert 2e6 * seconds([still], "2 Mbps") == 8 * 300
    assert 2e6 * seconds([still], "2 Mbps (uploads 16x slower)") == 8 * (16 * 200 + 100)
    assert seconds([record], "2 Mbps") == pytest.approx(0.5 + 8 * 300 / 2e6)
    by_link = seconds_by_link([record])
    assert list(by_link) == list(LINKS)
    assert by_link["2 Mbps (uploads 16x slower)"] > by_link["2 Mbps"]


def test_unknown_links_are_refused():
    with pytest.raises(ConfigError, match="unknown link"):
        seconds([], "3 Mbps")
