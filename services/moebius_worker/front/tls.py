"""The certificate that gateways see, and those that they must show: read for each handshake anew."""

import grpc
import structlog

from moebius_worker.settings import WorkerTls

log = structlog.get_logger(__name__)


def server_credentials(tls: WorkerTls) -> grpc.ServerCredentials:
    """Raises OSError if a file cannot be read. Later such faults leave what was read last."""
    used = _read(tls)

    def current() -> grpc.ServerCertificateConfiguration:
        """Called for each handshake."""
        nonlocal used
        try:
            used = _read(tls)
        except OSError as error:
            log.error("certificate not reloaded", error=str(error))
        return _configuration(used)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), current, require_client_authentication=tls.client_ca is not None
    )


def _read(tls: WorkerTls) -> tuple[bytes, bytes, bytes | None]:
    return (
        tls.key.read_bytes(),
        tls.cert.read_bytes(),
        None if tls.client_ca is None else tls.client_ca.read_bytes(),
    )


def _configuration(content: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    key, cert, client_ca = content
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)
