"""Layer 3. What drives the rounds: here, one machine that plays the server and all clients."""

from thinwire.engines.job import Job as Job
from thinwire.engines.job import RoundRecord as RoundRecord
from thinwire.engines.local import LocalEngine as LocalEngine
