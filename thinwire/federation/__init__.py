"""Who takes part in a run, and its rounds: sampling, local training, collecting uploads, evaluation."""

from thinwire.federation.job import Job as Job, RoundRecord as RoundRecord
from thinwire.federation.speed import Speed as Speed
