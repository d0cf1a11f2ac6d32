"""The file `task.py` of an app with data of one's own, for each kind of data: written by `thinwire app`."""
