"""Datasets, partitions, losses and tasks. Importing this package fills the registry; no data file is read."""

from thinwire.data import (
    arrays as arrays,
    causal_lm as causal_lm,
    huggingface as huggingface,
    images as images,
    named_images as named_images,
    named_texts as named_texts,
    partition as partition,
    question_sets as question_sets,
    table as table,
)
from thinwire.data.arrays import from_arrays as from_arrays
from thinwire.data.examples import Arrays as Arrays, Source as Source
from thinwire.data.huggingface import from_datasets as from_datasets
from thinwire.data.images import from_image_folder as from_image_folder
from thinwire.data.table import from_table as from_table
from thinwire.data.task import (
    PartitionDescription as PartitionDescription,
    as_examples as as_examples,
    describe_partition as describe_partition,
    make_task as make_task,
    pool_clients as pool_clients,
)
