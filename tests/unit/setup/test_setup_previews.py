"""Previews in the settings, and their certificates: the domain stays apart, the authority signs for nothing else."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cpuos.errors import InvalidRequest
from cpuos.settings import Settings, load_settings
from cpuos.setup.certificates import CERTIFICATE_DAYS, make_certificates


def test_defaults() -> None:
    settings = load_settings()
    assert (settings.preview_host, settings.preview_port) == ("127.0.0.1", 7072)
    assert settings.preview_domain == "preview.localhost"
    assert load_settings(preview_domain="Preview.Example.COM").preview_domain == "preview.example.com"


@pytest.mark.parametrize(
    "values",
    [
        {"preview_domain": "localhost"},
        {"preview_domain": "127.0.0.1"},
        {"preview_domain": "a..b"},
        {"preview_domain": "-a.example"},
        {"preview_domain": "a.example:80"},
        {"preview_domain": "*.a.example"},
        {"preview_domain": "a." + "b" * 64},
        {"preview_domain": ".".join(["b" * 60] * 4)},
        {"preview_domain": "cpuos.example.com", "api_public_url": "https://cpuos.example.com"},
        {"preview_domain": "cpuos.example.com", "api_public_url": "https://CPUOS.example.com:8443/x"},
        {"preview_domain": "cpuos.example.com", "gateway_public_url": "https://cpuos.example.com"},
        {"preview_domain": "cpuos.example.com", "api_host": "cpuos.example.com"},
        {"preview_domain": "cpuos.example.com", "gateway_host": "data.cpuos.example.com"},
        {"preview_domain": "example.com", "api_public_url": "https://api.example.com"},  # below the previews
        {"preview_domain": "preview.example.com", "api_public_url": "https://example.com"},  # above them
        {"preview_domain": "preview.localhost", "api_host": "preview.localhost"},
    ],
)
def test_a_domain_that_shares_cookies_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        load_settings(**values)
    assert raised.value.what.startswith("cannot read the settings: preview_domain = ")
    assert raised.value.hint == "unset CPUOS_PREVIEW_DOMAIN"


@pytest.mark.parametrize(
    "values",
    [
        {"preview_domain": "previews.example", "api_public_url": "https://cpuos.example"},
        {"preview_domain": "preview.example.com", "api_public_url": "https://api.example.com"},
        {"preview_domain": "preview.localhost", "api_host": "localhost"},
        {"preview_domain": "xpreview.localhost", "api_host": "preview.localhost"},
    ],
)
def test_a_domain_of_its_own_is_taken(values: dict[str, str]) -> None:
    assert load_settings(**values).preview_domain == values["preview_domain"]


@pytest.mark.parametrize(
    "url", ["https://other.example", "ftp://preview.localhost", "preview.localhost", "https://x.preview.localhost"]
)
def test_a_preview_url_names_the_preview_domain(url: str) -> None:
    with pytest.raises(InvalidRequest, match="preview_public_url"):
        load_settings(preview_public_url=url)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(state_dir=tmp_path / "state")


def test_a_certificate_for_the_domain(settings: Settings) -> None:
    made = make_certificates(settings)
    certificate = x509.load_pem_x509_certificates(made.certificate.read_bytes())[0]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["*.preview.localhost"]
    left = made.expires_at - datetime.now(UTC)
    assert timedelta(days=CERTIFICATE_DAYS - 1) < left <= timedelta(days=CERTIFICATE_DAYS)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.certificate.parent.iterdir()}
    assert modes == {"authority.pem": 0o644, "authority.key": 0o600, "preview.pem": 0o644, "preview.key": 0o640}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)


def test_the_authority_is_kept_and_the_certificate_is_fresh(settings: Settings) -> None:
    first = make_certificates(settings)
    authority, certificate = first.authority.read_bytes(), first.certificate.read_bytes()
    second = make_certificates(settings)
    assert second.authority.read_bytes() == authority
    assert second.certificate.read_bytes() != certificate
    other = make_certificates(settings.model_copy(update={"preview_domain": "previews.example"}))
    assert other.authority.read_bytes() != authority


def test_the_authority_signs_for_nothing_else(settings: Settings) -> None:
    """A browser that trusts it does not trust what a thief of its key signs for another name."""
    made = make_certificates(settings)
    folder = made.authority.parent
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    key = serialization.load_pem_private_key((folder / "authority.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    constraints = authority.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    for name, trusted in (("x.preview.localhost", True), ("login.example", False), ("localhost", False)):
        now = datetime.now(UTC)
        forged = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
            .sign(key, hashes.SHA256())
        )
        (folder / "forged.pem").write_bytes(forged.public_bytes(serialization.Encoding.PEM))
        assert _is_trusted(folder / "forged.pem", folder / "authority.key", made.authority, name) is trusted


def _is_trusted(certificate: Path, key: Path, authority: Path, name: str) -> bool:
    """A TLS handshake in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=str(authority))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname=name)
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(6):
        for side in (asks, answers):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
            except ssl.SSLError:
                continue
    return asks.version() is not None
