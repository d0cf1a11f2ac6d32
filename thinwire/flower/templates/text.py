"""Data, model and metrics of this app: the file to edit. It is the same at the server and at all sites.

The folder of a site (`data-dir` of its node) has one file, `texts.csv`, with one row for each example:

    text,label
    "Fever since Monday, no cough.",routine

Try the folder of a site with `thinwire site check`.
"""

from torch import nn

from thinwire.data.site import OwnData, SiteTexts

data = SiteTexts(
    file="texts.csv",
    text="text",
    target="label",
    classes=("routine", "urgent"),  # of all sites, in this order; a site need not have all of them
    length=128,  # words of a text that are used
    words=20_000,  # word ids, a hash of the word: sites need no common vocabulary
)


def network(words: int, classes: int, width: int = 32) -> nn.Module:
    """The model, a mean of word vectors without padding; `words` and `classes` are filled in from the data."""
    return nn.Sequential(nn.EmbeddingBag(words, width, mode="mean", padding_idx=0), nn.Linear(width, classes))


own = OwnData(data, network, metrics=("f1", "balanced-accuracy"))
task = own.task
