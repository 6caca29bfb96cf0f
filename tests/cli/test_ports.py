"""Ports of workers: nobody else is given one, whether its worker listens there or is dead."""

import socket
from pathlib import Path

import grpc
import pytest

from moebius_cli.errors import CliError
from moebius_cli.ports import HOST, hold_ports
from tests.ports import free_port


def test_they_differ_and_are_not_those_of_outgoing_connections() -> None:
    with hold_ports(50) as ports:
        assert len(set(ports)) == 50
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        assert not set(ports) & set(range(low, high + 1))


def test_another_stack_is_given_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebius_cli.ports.WORKER_PORTS", [free_port() for _ in range(4)])
    with hold_ports(2) as ours:
        with hold_ports(2) as theirs:
            assert not set(ours) & set(theirs)
            with pytest.raises(CliError, match="no 1 free ports"), hold_ports(1):
                pass
        with hold_ports(2) as theirs:
            assert not set(ours) & set(theirs)
    with hold_ports(4):
        pass


async def test_a_worker_may_listen_there_again_and_again() -> None:
    with hold_ports(1) as (port,):
        for _ in range(2):
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            assert server.add_insecure_port(f"{HOST}:{port}") == port
            await server.start()
            async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
                await channel.channel_ready()
            await server.stop(None)


def test_a_port_on_which_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    monkeypatch.setattr("moebius_cli.ports.WORKER_PORTS", [taken, free])
    with socket.create_server((HOST, taken)), hold_ports(1) as ports:
        assert ports == [free]
