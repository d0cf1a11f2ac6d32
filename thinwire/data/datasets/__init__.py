"""Loaders of datasets, one file per dataset or family; registered as tasks by `thinwire.data`."""
