"""What the files of a Flower app import: the experiment, the job of a machine, the ClientApp and the ServerApp."""

from __future__ import annotations

from thinwire.deployment.client_app import client_app
from thinwire.deployment.jobs import clients_of_node, job_of, read_experiment
from thinwire.deployment.own_data import site_jobs
from thinwire.deployment.server_app import server_app

__all__ = ["client_app", "clients_of_node", "job_of", "read_experiment", "server_app", "site_jobs"]
