"""Data, model and metrics of this app: the file to edit. It is the same at the server and at all sites.

The folder of a site (`data-dir` of its node) has one folder for each class, with PNG or JPEG images:

    benign/0001.png, benign/0002.png, malignant/0001.png

Try the folder of a site with `thinwire site check`.
"""

from torch import nn

from thinwire.data.site import OwnData, SiteImages

data = SiteImages(
    classes=("benign", "malignant"),  # of all sites, in this order; a site need not have all of them
    size=32,  # all images are resized to this height and width
    channels=3,  # 1 for gray
    mean=(0.5,),  # of pixel values from 0 to 1, by which they are scaled: the same at all sites
    std=(0.25,),
)


def network(channels: int, classes: int, width: int = 16) -> nn.Module:
    """The model, with one output for each class; `channels` and `classes` are filled in from the data."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )


own = OwnData(data, network, metrics=("f1", "balanced-accuracy"))
task = own.task
