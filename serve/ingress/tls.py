"""The certificate that clients see, read anew when its files change: a renewal needs no restart and loses no request.

Programs that renew certificates (certbot, cert-manager) replace two files, or the link to their folder, one after the
other. A pair that does not belong together is looked at again, and the one before stays in use.

The standard library alone is imported: `supervisor` has nothing else.
"""

import logging
import os
import ssl
import time
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 5.0
"""Seconds between two looks at the files."""
CONSISTENT_TIMEOUT_S = 2.0
"""Most seconds for which a program that is about to read both files waits until they belong together."""
CONSISTENT_POLL_S = 0.05


class CertificatePair(NamedTuple):
    """Certificate chain and private key, each in PEM."""

    certificate: bytes
    key: bytes


class CertificateFiles:
    """The files of a certificate and of its key, which may be the same."""

    def __init__(self, certificate: str | Path, key: str | Path):
        self.certificate, self.key = Path(certificate), Path(key)
        self._last_signature = self._signature()
        self._rejected_signature: object = None

    def read(self) -> CertificatePair:
        """Raises `OSError`."""
        return CertificatePair(self.certificate.read_bytes(), self.key.read_bytes())

    def read_renewed(self) -> CertificatePair | None:
        """The pair, if the files have changed since the last call; None if they have not, or if certificate and key do
        not match."""
        signature = self._signature()
        if signature == self._last_signature:
            return None
        try:
            self._check()
            pair = self.read()
        except OSError as error:  # ssl's own errors are among them
            if signature != self._rejected_signature:
                self._rejected_signature = signature
                logger.warning("the certificate %s cannot be used and the last one stays: %s", self.certificate, error)
            return None
        if signature != self._signature():  # written meanwhile: the next look has the rest
            return None
        self._last_signature = signature
        return pair

    def wait_until_consistent(self) -> None:
        """Wait until the files belong together, at most for `CONSISTENT_TIMEOUT_S`."""
        give_up_at = time.monotonic() + CONSISTENT_TIMEOUT_S
        while time.monotonic() < give_up_at:
            try:
                return self._check()
            except OSError:
                time.sleep(CONSISTENT_POLL_S)
        return None

    def _check(self) -> None:
        """Raise `OSError` where the files do not belong together."""
        # Without a passphrase it would be asked for on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes where one of the files is written, replaced, or reached by another link."""
        return tuple(_file_signature(path) for path in (self.certificate, self.key))


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        file_stat = os.stat(path)
    except OSError:
        return None
    return file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size
