"""Headers that make an answer safe to show. Nothing is imported: HAProxy's supervisor waits for it."""

HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On every answer: it is nobody's to store, to embed or to take for another type."""
CONTENT_POLICY = "content-security-policy"
NO_CONTENT = "default-src 'none'; frame-ancestors 'none'"
"""The content security policy of answers that are no page."""
ONLY_TLS = "max-age=31536000"


def of(tls: bool) -> dict[str, str]:
    """Those of an answer that is no page; `tls`: clients encrypt."""
    more = {"strict-transport-security": ONLY_TLS} if tls else {}
    return {**HEADERS, **more, CONTENT_POLICY: NO_CONTENT}
