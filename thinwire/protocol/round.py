"""The round, as every engine calls it: open, train and answer, close; and `advance`, which both sides compute alike.

    server                                    client
    open_round   ── steps or state ──►        receive        public(v), bit for bit (`down.py`)
                                              cohort_round   train, keep what is not sent, encode (`answer.py`)
    close_round  ◄── change ──────────        (`close.py`)
    advance: public(v) -> public(v + 1)       (the client does the same when it next hears)

The server applies the *decoded* broadcast to itself, so a lossy down link cannot make it drift from its clients. All
functions are pure: states go in and come out.
"""

from __future__ import annotations

from thinwire.protocol.advance import advance as advance
from thinwire.protocol.client import Reply as Reply
from thinwire.protocol.client import cohort_round as cohort_round
from thinwire.protocol.client import forget as forget
from thinwire.protocol.client import initial_client_state as initial_client_state
from thinwire.protocol.download import open_round as open_round
from thinwire.protocol.download import receive as receive
from thinwire.protocol.server import close_round as close_round
from thinwire.protocol.setup import agree as agree
from thinwire.protocol.setup import begin as begin
from thinwire.protocol.setup import plan_round as plan_round
