"""The file of API keys: what it may say, and that it never holds a key."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_gateway.admission.limits import Client, ClientLimits, Priority
from moebius_gateway.auth.keys import PREFIX, ApiKey, KeysError, hashed, new_key, parse_keys, written

HASH = "sha256:" + "a" * 64


def test_lines() -> None:
    text = f"# who\n\nteam-a {HASH}   # since May\nteam.b\tsha256:{'b' * 64}\n"
    assert [key.client.name for key in parse_keys(text)] == ["team-a", "team.b"]
    assert parse_keys(text)[0].client.limits == ClientLimits()


def test_toml() -> None:
    [key] = parse_keys(
        f'[[keys]]\nname = "a"\nhash = "{HASH}"\n'
        'priority = "high"\nmax_concurrent = 8\ntokens_per_minute = 1e5\n'
    )
    assert key == ApiKey(HASH, Client("a", ClientLimits(Priority.HIGH, 8, None, 1e5)))


def test_nothing_is_no_key() -> None:
    assert parse_keys("\n# none yet\n") == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sk-moebius-" + "x" * 40, "line 1 is not"),
        ("team-a sk-moebius-" + "x" * 40, "line 1: hash"),
        (f"a {HASH}\na sha256:{'b' * 64}", "key 2 has the name of one before it"),
        (f"a {HASH}\nb {HASH}", "key 2 has the hash of one before it"),
        (f"a/b {HASH}", "line 1: name"),
        ('[[keys]]\nname = "a"', "key 1: hash"),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nmax_concurrent = 0', "key 1: max_concurrent"),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nlimit = 3', "key 1: limit"),
        ("[[keys]]\nname =", "not TOML"),
        ("x = 1\n[[keys]]\n", "'x' beside 'keys'"),
    ],
)
def test_faults_are_named_without_quoting_what_may_be_a_key(text: str, fault: str) -> None:
    with pytest.raises(KeysError, match=fault) as error:
        parse_keys(text)
    assert "xxxx" not in str(error.value)


def test_keys_are_long_random_and_recognisable() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) > 50 for key in keys)
    assert hashed("abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()


limits = st.builds(
    ClientLimits,
    st.sampled_from(Priority),
    st.none() | st.integers(1, 1000),
    st.none() | st.floats(0.1, 1e9),
    st.none() | st.floats(0.1, 1e9),
)


@given(st.lists(limits, max_size=5))
def test_what_is_written_is_read(given_limits: list[ClientLimits]) -> None:
    keys = tuple(ApiKey(hashed(str(i)), Client(f"c{i}", one)) for i, one in enumerate(given_limits))
    assert parse_keys(written(keys)) == keys
