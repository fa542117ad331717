"""The web page that the agent serves: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from sidecar.model import Frozen

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(Frozen, frozen=True, kw_only=True):
    """The page and the Content-Security-Policy under which it works."""

    body: bytes
    policy: str

    @staticmethod
    def load() -> Page:
        """Read the packaged page. The policy allows exactly its own script and style, by their hashes."""
        body = (files("sidecar") / "web" / "index.html").read_bytes()
        allowed: dict[str, list[str]] = {"script": [], "style": []}
        for kind, text in _INLINE.findall(body):
            digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
            allowed[kind.decode()].append(f"'sha256-{digest}'")
        return Page(
            body=body,
            policy="; ".join(
                (
                    "default-src 'none'",
                    f"script-src {' '.join(allowed['script'])}",
                    f"style-src {' '.join(allowed['style'])}",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                )
            ),
        )
