"""Measurements of thinwire; `README.md` lists them."""
