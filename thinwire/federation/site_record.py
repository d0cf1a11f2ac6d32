"""What the server of a deployment knows about one client in one round."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["accepted", "bounded", "refused", "absent", "late"]


class SiteRecord(NamedTuple):
    """One client in one round, as a line of `sites.jsonl`.

    Args:
        round: the round, from 1.
        site: what logs call the client: the name of its site, or its number.
        client: its number.
        status: `accepted`; `bounded`: accepted and scaled down; `refused`: not used; `absent`: no response in time;
            `late`: the round was closed before it responded.
        norm: of its update, as received; None if it was not compared with those of others.
        loss: its training loss, as reported; None if it is not a finite number.
        seconds: from the request to the response; None without a response.
        bytes_up: bytes that it sent in this round.
        bytes_down: bytes that were sent to it.
        why: the reason of its status, on one line of at most 300 characters; "" if it is `accepted`.
        attempt: how often the run had gone back before.
    """

    round: int
    site: str
    client: int
    status: Status
    norm: float | None = None
    loss: float | None = None
    seconds: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    why: str = ""
    attempt: int = 0
