"""Datasets, partitions, losses and tasks. Importing this package fills the registry; no data file is read."""

from thinwire.data import arrays as arrays
from thinwire.data import causal_lm as causal_lm
from thinwire.data import huggingface as huggingface
from thinwire.data import images as images
from thinwire.data import leaf as leaf
from thinwire.data import named_images as named_images
from thinwire.data import named_texts as named_texts
from thinwire.data import partition as partition
from thinwire.data import table as table
from thinwire.data.arrays import from_arrays as from_arrays
from thinwire.data.describe_partition import PartitionDescription as PartitionDescription
from thinwire.data.describe_partition import describe_partition as describe_partition
from thinwire.data.examples import Arrays as Arrays
from thinwire.data.examples import Source as Source
from thinwire.data.huggingface import from_datasets as from_datasets
from thinwire.data.images import from_image_folder as from_image_folder
from thinwire.data.table import from_table as from_table
from thinwire.data.task import as_examples as as_examples
from thinwire.data.task import make_task as make_task
from thinwire.data.task import pool_clients as pool_clients
