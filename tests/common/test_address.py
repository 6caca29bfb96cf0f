import pytest

from moebius_common.address import split_address


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535))]
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["localhost", ":1", "h:x", "h:65536", "h:-1", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        split_address(address)
