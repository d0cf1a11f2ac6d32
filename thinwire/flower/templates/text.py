"""Data, model and metrics of this app: the file to edit. It is the same at the server and at all sites.

The folder of a site (`data-dir` of its node) has one file, `texts.csv`, with one row for each example:

    text,label
    "Fever since Monday, no cough.",routine

Try the folder of a site with `thinwire site check`.
"""

from torch import Tensor, nn

from thinwire.data.site import OwnData, SiteTexts

data = SiteTexts(
    file="texts.csv",
    text="text",
    target="label",
    classes=("routine", "urgent"),  # of all sites, in this order; a site need not have all of them
    length=128,  # words of a text that are used
    words=20_000,  # word ids, a hash of the word: sites need no common vocabulary
)


class Network(nn.Module):
    """The model, a mean of word vectors; `words` and `classes` are filled in from the data."""

    def __init__(self, words: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """One output for each class; id 0 is padding."""
        known = (ids > 0).unsqueeze(-1)
        mean = (self.embedding(ids) * known).sum(1) / known.sum(1).clamp(min=1)
        out: Tensor = self.head(mean)
        return out


own = OwnData(data, Network, metrics=("f1", "balanced-accuracy"))
task = own.task
