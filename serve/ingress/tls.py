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

LOOK_S = 5.0
"""Seconds between two looks at the files."""
SETTLE_S = 2.0
"""Most seconds for which a program that is about to read both files waits until they belong together."""
SETTLE_LOOK_S = 0.05


class Pair(NamedTuple):
    """A certificate, with those that vouch for it, and its private key, each in PEM."""

    certificate: bytes
    key: bytes


class CertificateFiles:
    """The files of a certificate and of its key, which may be the same."""

    def __init__(self, certificate: str | Path, key: str | Path):
        self.certificate, self.key = Path(certificate), Path(key)
        self._seen = self._stamp()
        self._refused: object = None

    def read(self) -> Pair:
        """Raises `OSError`."""
        return Pair(self.certificate.read_bytes(), self.key.read_bytes())

    def renewed(self) -> Pair | None:
        """The pair where it has changed since the last one that was given, or since this object was made; None where it
        has not, or where the files do not belong together."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        try:
            self._check()
            pair = self.read()
        except OSError as error:  # ssl's own errors are among them
            if stamp != self._refused:
                self._refused = stamp
                logger.warning("the certificate %s cannot be used and the last one stays: %s", self.certificate, error)
            return None
        if stamp != self._stamp():  # written meanwhile: the next look has the rest
            return None
        self._seen = stamp
        return pair

    def settle(self) -> None:
        """Wait until the files belong together, at most for `SETTLE_S`."""
        give_up = time.monotonic() + SETTLE_S
        while time.monotonic() < give_up:
            try:
                return self._check()
            except OSError:
                time.sleep(SETTLE_LOOK_S)
        return None

    def _check(self) -> None:
        """Raise `OSError` where the files do not belong together."""
        # Without a passphrase it would be asked for on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes where one of the files is written, replaced, or reached by another link."""
        return tuple(_stamp(path) for path in (self.certificate, self.key))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
