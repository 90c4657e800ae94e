"""Where a session is found, and the key that opens it: one per session, or one for a whole server (`asyncrl serve`)."""

from __future__ import annotations

import hmac
import secrets
from urllib.parse import quote


def new_secret() -> bytes:
    """What the session keys of one run are derived from."""
    return secrets.token_bytes(32)


def session_key(secret: bytes, session: str) -> str:
    """The key of one session; it opens no other."""
    return hmac.new(secret, session.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def session_url(url: str, session: str) -> str:
    """The base URL of a session of the gateway at ``url``."""
    return f"{url}/sessions/{quote(session, safe='')}/v1"


def same_key(given: str, right: str) -> bool:
    """Whether a client's key is right, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode())
