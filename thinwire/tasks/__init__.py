"""Data sets, and how they are split among clients. Importing this package fills the registry; files are read later."""

from thinwire.tasks import dirichlet as dirichlet
from thinwire.tasks import shards as shards
from thinwire.tasks import splits as splits
