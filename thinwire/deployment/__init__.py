"""Deployments over Flower: app folders, a whole deployment on one machine, long-running nodes."""
