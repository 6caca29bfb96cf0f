"""Log lines: structlog to stderr, JSON or for people; those of libraries in the same form."""

import logging
import re
import sys
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, Processor

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# What looks like an API key is in no line, whoever put it there.
SECRET = re.compile(r"\b(sk-|bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def configure_logs(log_format: LogFormat, level: LogLevel = "info", **fields: object) -> None:
    """Called once, when the process starts; `fields` are on every line, whichever thread it comes from."""

    def add_fields(logger: object, method: str, event: EventDict) -> EventDict:
        return {**fields, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_fields,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without the values of variables: those hold what users wrote, and take seconds to lay out.
    plain = structlog.dev.plain_traceback
    last: list[Processor] = (
        [structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [
            _show_controls,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain),
        ]
    )
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                *last,
                _mask,
            ],
        )
    )
    logging.basicConfig(level=least, handlers=[handler], force=True)


def _show_controls(logger: object, method: str, event: EventDict) -> EventDict:
    """What clients write shall not steer the terminal of whoever reads it. Tracebacks keep their lines."""
    return {
        name: CONTROL.sub(lambda found: repr(found[0])[1:-1], value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _mask(logger: Any, method: str, line: Any) -> str:
    return SECRET.sub(r"\1***", line)
