"""Data sets, and how they are split among clients. Importing this package fills the registry; files are read later."""

from thinwire.tasks import cifar as cifar
from thinwire.tasks import digits as digits
from thinwire.tasks import dirichlet as dirichlet
from thinwire.tasks import glue as glue
from thinwire.tasks import idx as idx
from thinwire.tasks import leaf as leaf
from thinwire.tasks import newsgroups as newsgroups
from thinwire.tasks import shakespeare as shakespeare
from thinwire.tasks import shards as shards
from thinwire.tasks import splits as splits
from thinwire.tasks import texts as texts
