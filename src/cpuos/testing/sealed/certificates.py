"""A certificate authority of the fake internet: a leaf for every name that is asked for."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority"]

_DAY = datetime.timedelta(days=1)


class Authority:
    """Its key never leaves this object; contexts of leaves are kept by name."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fake Internet CA")])
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: dict[str, ssl.SSLContext] = {}
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        """The root certificate: what a client must trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def server_context(self, folder: Path) -> ssl.SSLContext:
        """Answers every name with its own leaf, and leaves the name on the connection as `asked_name`.

        `folder` holds the files that `ssl` wants to read.
        """
        folder.mkdir(parents=True, exist_ok=True)

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.asked_name = name  # type: ignore[attr-defined]
            connection.context = self._context(name or "nameless.test", folder)

        context = self._context("nameless.test", folder)
        context.sni_callback = choose  # type: ignore[assignment]
        return context

    def _context(self, name: str, folder: Path) -> ssl.SSLContext:
        if name not in self._contexts:
            path = folder / "leaf.pem"
            path.write_bytes(self._leaf(name))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(path)
            self._contexts[name] = context
        return self._contexts[name]

    def _leaf(self, name: str) -> bytes:
        try:
            shown: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            shown = x509.DNSName(name)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        builder = self._builder(subject, self._leaf_key)
        builder = builder.add_extension(x509.SubjectAlternativeName([shown]), critical=False)
        leaf = builder.sign(self._key, hashes.SHA256())
        private = self._leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private + leaf.public_bytes(serialization.Encoding.PEM)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + 30 * _DAY)
        )
