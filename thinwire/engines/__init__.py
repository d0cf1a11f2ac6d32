"""Layer 3. What drives the rounds: here, one machine that plays the server and all clients."""

from thinwire.engines.local import Job as Job
from thinwire.engines.local import LocalEngine as LocalEngine
from thinwire.engines.local import RoundRecord as RoundRecord
