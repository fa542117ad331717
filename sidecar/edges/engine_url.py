"""`--engine-url` as people write it."""

from __future__ import annotations

from yarl import URL


def base_url(url: str) -> str:
    """`--engine-url` without a trailing slash and without the `/v1` that OpenAI clients are given.

    Raises ValueError if it isn't an http(s) URL of a host, or holds credentials.
    """
    try:
        parts = URL(url)
        usable = parts.scheme in ("http", "https") and bool(parts.host) and parts.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"--engine-url {url!r}: write http://HOST:PORT")
    if parts.user is not None or parts.password is not None:
        raise ValueError(
            "--engine-url must hold no credentials: put vLLM's API key into a file for --engine-api-key-file"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
