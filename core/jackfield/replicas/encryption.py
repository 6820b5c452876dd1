"""TLS between a server in front and its replicas, where the cluster of Ray has it.

The files are Ray's own (`RAY_USE_TLS`, `RAY_TLS_SERVER_CERT`, `RAY_TLS_SERVER_KEY`,
`RAY_TLS_CA_CERT`); each end shows its certificate, and names in it are not compared.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from jackfield.errors import UsageError, shown

_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


def context(kind: int) -> ssl.SSLContext | None:
    """Of a server or a client (`ssl.PROTOCOL_TLS_…`); None where the cluster has no TLS.

    Raises UsageError where its files are no good.
    """
    if not _wanted():
        return None
    certificate, key, authority = (os.environ.get(name, "") for name in _FILES)
    made = ssl.SSLContext(kind)
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    try:
        made.load_cert_chain(certificate, key, password=str)
        made.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise _no_good(error) from None
    return made


def channel(grpc: Any, address: str) -> Any:
    """One of gRPC to a cluster. Raises UsageError where the files are no good."""
    if not _wanted():
        return grpc.insecure_channel(address)
    try:
        certificate, key, authority = (
            Path(os.environ.get(name, "")).read_bytes() for name in _FILES
        )
    except OSError as error:
        raise _no_good(error) from None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate))


def _wanted() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _no_good(error: Exception) -> UsageError:
    return UsageError(
        f"RAY_USE_TLS is set, and its files ({', '.join(_FILES)}) are no good: {shown(error)}"
    )
