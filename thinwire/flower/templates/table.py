"""Data, model and metrics of this app: the file to edit. It is the same at the server and at all sites.

The folder of a site (`data-dir` of its node) has one file, `records.csv`, with one row for each example:

    age,dose,sex,outcome
    71,2.5,female,good

Try the folder of a site with `thinwire site check`.
"""

from torch import nn

from thinwire.data.site import OwnData, SiteTable

data = SiteTable(
    file="records.csv",
    target="outcome",
    classes=("bad", "good"),  # of all sites, in this order; a site need not have all of them
    numbers={"age": (60.0, 20.0), "dose": (2.0, 1.0)},  # column: mean and standard deviation; None: of the site's rows
    categories={"sex": ("female", "male")},  # column: its texts; all other texts share one more input
    missing=("dose",),  # columns of numbers in which cells may be empty
)


def network(inputs: int, classes: int, hidden: int = 32) -> nn.Module:
    """The model, with one output for each class; `inputs` and `classes` are filled in from the data."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


own = OwnData(data, network, metrics=("f1", "balanced-accuracy"))
task = own.task
