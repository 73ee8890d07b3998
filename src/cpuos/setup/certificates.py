"""Certificates for previews on this machine: a small authority that can sign for the preview domain and nothing else.

Browsers are told to trust the authority once; its name constraints keep what its key could do to that domain.
"""

from __future__ import annotations

import grp
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cpuos.errors import SetupRequired
from cpuos.settings import Settings
from cpuos.setup.users import GROUP

__all__ = ["Certificates", "make_certificates"]

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397
"""What browsers take at most."""


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Where they lie."""

    domain: str
    authority: Path
    """For browsers to trust."""
    certificate: Path
    key: Path
    expires_at: datetime


def make_certificates(settings: Settings) -> Certificates:
    """A fresh certificate for `*.DOMAIN`, signed by this instance's authority, which is made at the first call."""
    folder = settings.state_dir / "certs"
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        _give_to_group(folder, mode=0o750)
        authority, authority_key = _authority(folder, settings.preview_domain)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(settings.preview_domain, key, authority=authority, authority_key=authority_key)
        _write(folder / "preview.key", _pem_of_key(key), mode=0o640)
        chain = certificate.public_bytes(serialization.Encoding.PEM) + authority.public_bytes(
            serialization.Encoding.PEM
        )
        _write(folder / "preview.pem", chain, mode=0o644)
    except PermissionError as error:
        raise SetupRequired(
            f"cannot write certificates below {folder}", str(error), code="needs_root", hint="sudo cpuos certs"
        ) from error
    return Certificates(
        domain=settings.preview_domain,
        authority=folder / "authority.pem",
        certificate=folder / "preview.pem",
        key=folder / "preview.key",
        expires_at=certificate.not_valid_after_utc,
    )


def _authority(folder: Path, domain: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The one that is there, if it is for this domain; else a new one, which browsers have to be told of again."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "authority.key").read_bytes(), password=None)
        constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
        left = certificate.not_valid_after_utc - datetime.now(UTC)
    except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
        pass
    else:
        fits = constraints.permitted_subtrees == [x509.DNSName(domain)] and left > timedelta(days=CERTIFICATE_DAYS)
        if fits and isinstance(key, ec.EllipticCurvePrivateKey):
            return certificate, key
    made = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"cpuOS previews of {domain}"[:64])])
    builder = _builder(name, issuer=name, key=made.public_key(), days=AUTHORITY_DAYS)
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(
            x509.NameConstraints(permitted_subtrees=[x509.DNSName(domain)], excluded_subtrees=None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(made.public_key()), critical=False)
    )
    certificate = builder.sign(made, hashes.SHA256())
    _write(folder / "authority.key", _pem_of_key(made), mode=0o600)
    _write(folder / "authority.pem", certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return certificate, made


def _certificate(
    domain: str,
    key: ec.EllipticCurvePrivateKey,
    *,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"*.{domain}"[:64])])
    builder = _builder(name, issuer=authority.subject, key=key.public_key(), days=CERTIFICATE_DAYS)
    builder = (
        builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(f"*.{domain}")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    return builder.sign(authority_key, hashes.SHA256())


def _builder(
    subject: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Whole or not at all, and never readable by more than it should be."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    _give_to_group(partial, mode=mode)
    partial.replace(path)


def _give_to_group(path: Path, *, mode: int) -> None:
    """The gateway reads its key by the group; where set-up has made none, it runs as whoever calls this."""
    try:
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    except (KeyError, PermissionError):
        pass
    path.chmod(mode)
