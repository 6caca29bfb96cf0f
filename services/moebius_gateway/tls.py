"""The certificate that clients see, exchanged without a restart when its files change."""

import asyncio
import ssl
from pathlib import Path

import structlog

# Seconds between looks at the files.
LOOK_SECONDS = 5.0

logger = structlog.get_logger(__name__)


class ServerTls:
    """Connections that are open keep the certificate with which they began."""

    def __init__(self, cert: Path, key: Path) -> None:
        """PEM files. Raises OSError if they cannot be read or do not belong together."""
        self._cert, self._key = cert, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._content = self._read()
        self.context.load_cert_chain(cert, key)

    async def keep_current(self) -> None:
        """For ever. Files that cannot be used, perhaps half written, change nothing."""
        fault = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if (content := self._read()) == self._content:
                    continue
                # On a context of its own first: a failure leaves the one in use half changed.
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._cert, self._key)
                self.context.load_cert_chain(self._cert, self._key)
            except OSError as error:  # those of ssl are such as well
                if fault != str(error):
                    logger.error("certificate not reloaded", file=str(self._cert), error=str(error))
                fault = str(error)
                continue
            self._content, fault = content, ""
            logger.info("certificate reloaded", file=str(self._cert))

    def _read(self) -> tuple[bytes, bytes]:
        return self._cert.read_bytes(), self._key.read_bytes()
