"""API keys: who asks, and how often they may."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Mapping

from jackfield.serving.errors import ApiError
from jackfield.serving.settings import KeySettings, digest


def new_key() -> tuple[str, str]:
    """A key and its SHA-256, of which only the latter is to be kept."""
    key = f"jf-{secrets.token_urlsafe(32)}"
    return key, digest(key)


class Keys:
    """Knows who may ask. Without any key everybody may, and is nobody ("")."""

    def __init__(self, keys: Mapping[str, KeySettings]) -> None:
        self._digests = {name: key.sha256.lower() for name, key in keys.items()}
        self._buckets = {
            name: Bucket(key.requests_per_minute, time.monotonic)
            for name, key in keys.items()
            if key.requests_per_minute is not None
        }

    def owner(self, authorization: str | None) -> str:
        """Whose key stands in an Authorization header. Raises ApiError (401)."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401, "there is no API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )  # fmt: skip
        found = digest(key.strip())
        owners = [n for n, own in self._digests.items() if hmac.compare_digest(own, found)]
        if not owners:
            raise ApiError(401, "the API key is not known here", code="invalid_api_key")
        return owners[0]

    def count(self, owner: str) -> None:
        """Count a request. Raises ApiError (429) where the key's rate is used up."""
        bucket = self._buckets.get(owner)
        if bucket is not None and (wait := bucket.take()):
            raise ApiError(
                429, f"more than {bucket.per_minute} requests a minute with this key; wait",
                code="rate_limit_exceeded", retry_after=wait,
            )  # fmt: skip


class Bucket:
    """A token bucket: as many requests a minute, of which all may come at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left, self._seen = float(per_minute), clock()

    def take(self) -> float:
        """Take one; 0, or, where none is left, the seconds until there will be one."""
        now = self._clock()
        grown = self._left + (now - self._seen) * self.per_minute / 60
        self._left, self._seen = min(float(self.per_minute), grown), now
        if self._left < 1:
            return (1 - self._left) * 60 / self.per_minute
        self._left -= 1
        return 0.0
