"""Network addresses as settings have them."""

from typing import Annotated

from pydantic import AfterValidator


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[ipv6]:port` as host (without brackets) and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address; write host:port, for example 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _checked(address: str) -> str:
    split_address(address)
    return address


# The type of a setting that holds one.
Address = Annotated[str, AfterValidator(_checked)]
