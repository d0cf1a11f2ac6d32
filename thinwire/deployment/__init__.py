"""Deployment over Flower: app folders, a deployment on one machine, and SuperNodes with low latency."""
