"""What a simulation and a deployment share: the job, its records, sampling of clients and batches."""

from thinwire.runtime.job import Job as Job, RoundRecord as RoundRecord
from thinwire.runtime.speed import Speed as Speed
