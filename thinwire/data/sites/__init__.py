"""Data of one's own in a deployment: what a site's folder holds, and the task that it becomes.

base.py      `SiteData`, the contract; `OwnData`, data and model together
table.py     a table in a file
images.py    images in folders, one for each class
texts.py     texts in a table
records.py   conversations or texts for a language model
"""

from thinwire.data.sites.base import OwnData as OwnData
from thinwire.data.sites.base import SiteData as SiteData
from thinwire.data.sites.images import SiteImages as SiteImages
from thinwire.data.sites.records import SiteRecords as SiteRecords
from thinwire.data.sites.table import SiteTable as SiteTable
from thinwire.data.sites.texts import SiteTexts as SiteTexts
