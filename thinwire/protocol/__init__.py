"""The round between server and clients: methods, states, and the functions both sides call."""

from thinwire.protocol.asynchronous import Asynchronous as Asynchronous
from thinwire.protocol.budget import Budget as Budget, Tier as Tier
from thinwire.protocol.method import Method as Method
from thinwire.protocol.stage import Stage as Stage
