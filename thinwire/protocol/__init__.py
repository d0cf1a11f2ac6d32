"""The round between server and clients: methods, states, and the functions both sides call."""

from thinwire.protocol.method import (
    Asynchronous as Asynchronous,
    Budget as Budget,
    Method as Method,
    Stage as Stage,
    Tier as Tier,
)
