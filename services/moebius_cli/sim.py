"""`moebius sim`: many simulated workers in one process, for load tests without GPUs."""

import typer

from moebius_worker.sim.host import main


def sim(context: typer.Context) -> None:
    """Host simulated workers: they speak the workers' protocol and take time instead of computing.

    Each is on a port of its own, from that of --listen on. Takes the settings of a worker.

    Examples: moebius sim --workers 100 --listen 127.0.0.1:20000 --sim.ttft 0.2 --sim.itl 0.02

    moebius-gateway --workers 127.0.0.1:20000,127.0.0.1:20001
    """
    main(context.args)
