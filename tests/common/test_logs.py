"""What log lines look like; in a process of their own, since logs are set up for a whole process."""

import json
import subprocess
import sys

PROGRAM = """
import logging, sys, threading, structlog
from moebius_common.logs import configure_logs
configure_logs(sys.argv[1], "info", process="front")
log = structlog.get_logger("mine")
log.debug("too little")
thread = threading.Thread(target=lambda: log.info("from a thread"))
thread.start()
thread.join()
structlog.contextvars.bind_contextvars(request_id="r")
logging.getLogger("library").warning("of %s", "others")
try:
    secret = "what a user wrote"
    raise RuntimeError("broken")
except RuntimeError:
    log.exception("failed", worker="w", key="sk-moebius-" + "x" * 20)
log.info("Authorization: Bearer " + "y" * 20, task="ask-somebody-something-long")
"""


def lines(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json() -> None:
    thread, library, failed, masked = map(json.loads, lines("json"))
    assert (thread["event"], thread["process"], thread["logger"]) == ("from a thread", "front", "mine")
    assert (library["event"], library["level"], library["logger"]) == ("of others", "warning", "library")
    assert library["process"] == "front"
    assert library["request_id"] == failed["request_id"] == "r"
    assert "RuntimeError: broken" in failed["exception"]
    assert failed["key"] == "sk-***"
    assert (masked["event"], masked["task"]) == ("Authorization: Bearer ***", "ask-somebody-something-long")
    assert "what a user wrote" not in failed["exception"].replace('secret = "what a user wrote"', "")


def test_console() -> None:
    text = "\n".join(lines("console"))
    assert "RuntimeError: broken" in text
    assert "of others" in text
    assert "process=front" in text
    assert "too little" not in text
    assert "xxx" not in text
    assert "yyy" not in text


STEERING = r"""
import logging, structlog
from moebius_common.logs import configure_logs
configure_logs("console")
log = structlog.get_logger("mine")
log.info("asked \x1b[2J", path="/v1/\x1b]0;title\x07", spaced="a \x9b2J", host="\x00\r\x7f")
logging.getLogger("library").warning("%s", "\x1b[31mred")
try:
    raise RuntimeError("two\nlines \x1b[5m")
except RuntimeError:
    log.exception("failed")
"""


def test_what_clients_write_does_not_steer_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEERING], capture_output=True, text=True, timeout=30, check=True
    )
    assert not [char for char in done.stderr if char != "\n" and not char.isprintable()]
    assert r"/v1/\x1b]0;title\x07" in done.stderr
    assert "two\nlines" in done.stderr
