"""TLS of a server: its certificate, read again when the files change, and the connections that begin with a handshake.

A connection counts for the guard from the moment it is accepted, so a client that never finishes its handshake is
bounded as any other. Each handshake uses the certificate that is valid then; open connections keep theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from forebay.broker.guard import Guard, GuardedProtocol
from forebay.errors import Invalid
from forebay.settings import ServerSettings

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often the files are looked at. A change is used once two looks have found the same: it is complete then."""
SHUTDOWN_SECONDS: Final = 5.0
"""How long a client may take to confirm the end of a connection."""
RETRY_SECONDS: Final = 1.0
"""How long no connection is accepted after the system had no descriptor for one."""
HANDSHAKE: Final = "tls_handshake"
"""The reason under which handshakes that failed are counted."""


class ServerCertificate:
    """The certificate and key of a server, as the files say.

    The event loop reads `context`; a thread looks at the files. One that cannot be used leaves the context as it is.
    """

    def __init__(self, certificate: str, key: str) -> None:
        """`Invalid` names the setting and the file if the two cannot be used."""
        self._certificate = certificate
        self._key = key
        self._seen = self._tried = self._digest()
        self._complaint: str | None = None
        """What was logged about files that cannot be used."""
        self.context = self._load()
        """For the handshakes that begin now; replaced as a whole."""

    @classmethod
    def of(cls, settings: ServerSettings) -> ServerCertificate | None:
        """The one that the settings name; `None` without TLS."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(settings.tls_cert, settings.tls_key)

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Use the files if they have changed and then stayed the same for one look. Reads files: not for the loop."""
        try:
            digest = self._digest()
            if digest == self._tried or digest != self._seen:
                self._seen = digest
                return
            self._tried = digest
            self.context = self._load()
        except Invalid as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("the certificate that was read before stays in use, until its files are mended: %s", error)
            return
        self._complaint = None
        logger.info("the certificate %s has changed: new connections use it", self._certificate)

    def _digest(self) -> bytes:
        """What the two files hold."""
        found = hashlib.sha256()
        for name, path in (("server.tls_cert", self._certificate), ("server.tls_key", self._key)):
            try:
                found.update(hashlib.sha256(Path(path).read_bytes()).digest())
            except OSError as error:
                raise Invalid(
                    f"{name}: {path} cannot be read ({error.strerror}): give the path of a PEM file that this process "
                    "may read"
                ) from error
        return found.digest()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            # A context of its own: it is only asked whether this is a certificate at all.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(self._certificate)
        except ssl.SSLError as error:
            raise Invalid(f"server.tls_cert: {self._certificate} has no certificate in PEM: {error.reason}") from error
        try:
            context.load_cert_chain(self._certificate, self._key, _no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise Invalid(
                    f"server.tls_key: {self._key} is not the key of the certificate {self._certificate} "
                    "(server.tls_cert): give the two that were made together, the certificate of the server first"
                ) from error
            raise Invalid(f"server.tls_key: {self._key} has no private key in PEM: {error.reason}") from error
        except _Encrypted:
            raise Invalid(
                f"server.tls_key: {self._key} is encrypted, and a server is given no password: store it decrypted, "
                "readable by the user of the server alone"
            ) from None
        return context


class TlsListener:
    """Accepts connections and has each begin with a handshake. For one event loop."""

    def __init__(
        self,
        bound: socket.socket,
        certificate: ServerCertificate,
        guard: Guard,
        make_connection: Callable[[], GuardedProtocol],
    ) -> None:
        self._bound = bound
        self._certificate = certificate
        self._guard = guard
        self._make_connection = make_connection
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept until cancelled; handshakes that are under way then are cut off."""
        try:
            while True:
                await self._accept()
        finally:
            self._bound.close()
            for task in list(self._handshakes):
                task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, address = await loop.sock_accept(self._bound)
        except ConnectionError:
            return
        except OSError as error:
            logger.error("no connection can be accepted for now: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
            return
        connection = self._make_connection()
        refusal = self._guard.enter(connection, address[0])
        if refusal is not None:
            # Without a handshake no answer can be sent.
            self._guard.refused[refusal.code] += 1
            self._guard.leave(connection)
            accepted.close()
            return
        task = loop.create_task(self._shake(connection, accepted))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake(self, connection: GuardedProtocol, accepted: socket.socket) -> None:
        """Hand the connection on once its handshake is done; forget it if that fails, or takes too long."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._certificate.context,
                ssl_handshake_timeout=self._guard.settings.request_timeout_ms / 1000,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except OSError as error:
            # A client that speaks no TLS, goes away, trusts another certificate or is too slow.
            self._guard.refused[HANDSHAKE] += 1
            self._guard.leave(connection)
            logger.debug("a handshake failed: %s", error)
        except asyncio.CancelledError:
            self._guard.leave(connection)
            raise


class _Encrypted(Exception):
    """A key asks for a password."""


def _no_password() -> NoReturn:
    raise _Encrypted
