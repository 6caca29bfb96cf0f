"""Log lines to stderr, JSON or for people."""

import logging
import sys
from typing import Literal

import structlog


def configure_logs(log_format: Literal["console", "json"]) -> None:
    """Called once, when the process starts."""
    renderer: tuple[structlog.typing.Processor, ...] = (
        (structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer())
        if log_format == "json"
        else (structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
