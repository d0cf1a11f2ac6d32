"""Partitions of a dataset into clients; base.py is the contract."""
