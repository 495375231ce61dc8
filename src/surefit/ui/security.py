"""The checks that every request passes before a page sees it, as one ASGI middleware around the whole app.

- Host: a name that this server has. Another site's name that resolves to 127.0.0.1 (DNS rebinding) is rejected; an
  IP address cannot be rebound, so any will do if the server listens beyond loopback.
- Token: compared in constant time, in the address once, in a cookie (HttpOnly, SameSite=Strict) from then on. Also on
  loopback, which this machine's other users can reach.
- Sec-Fetch-Site: requests from other sites are rejected, except for opening a page by a link.
- POST: from a page of this server only, by Origin and by the CSRF token that only such a page has.
- `LOCAL_ONLY`: what writes into the workspace or starts a stage is for this machine alone, wherever the server listens.
- Body: at most `MAX_BODY` bytes, declared or not; that of `UPLOAD` is streamed, and limited where it is stored.
- The response has a content security policy without inline scripts and without any other server.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 1 << 20
"""A config has 256 KiB at most, and JSON writes some characters as six."""
UPLOAD = "/api/upload"
LOCAL_ONLY = (UPLOAD, "/api/draft", "/api/save", "/api/simulate", "/api/start", "/api/stop", "/api/chat")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""The policy of report.html, which contains its scripts: in an origin of its own, without network access."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Return whether `host` is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class AccessPolicy:
    """Rules for the requests that are let in.

    Attributes:
        host, port: where the server listens.
        token: secret that a visitor must know.
        csrf: secret that only pages of this server know.
    """

    host: str
    port: int
    token: str
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def cookie(self) -> str:
        """Name of this server's cookie: cookies are the same for all ports of a host, so each server needs its own
        name."""
        return f"surefit_{self.port}"

    def knows_host(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        try:
            parts = urlsplit(f"//{header}")
            name, port = (parts.hostname or "").lower(), parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.netloc != header or parts.username is not None:
            return False
        if is_loopback(self.host):
            return name in LOOPBACK_NAMES or name == self.host
        return name in (*LOOPBACK_NAMES, self.host, socket.gethostname().lower()) or is_address(name)

    def admits(self, given: str | None) -> bool:
        """Return whether a token is the right one."""
        return constant_time_equal(given or "", self.token)


def constant_time_equal(given: str, expected: str) -> bool:
    """Compare two texts in a time that reveals nothing about them."""
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


class SecurityMiddleware:
    """ASGI middleware that checks requests and sets the security headers."""

    def __init__(self, app: ASGIApp, door: AccessPolicy) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        if scope["path"] == UPLOAD:
            await self.app(scope, receive, _with_headers(send))
            return
        body = await _body(receive) if scope["method"] == "POST" else b""
        if body is None:
            too_large = PlainTextResponse(f"More than {MAX_BODY:,} bytes.", 413, {"Connection": "close"})
            await too_large(scope, receive, _with_headers(send))
            return
        await self.app(scope, _replay_body(body, receive), _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response to a request that is rejected, or None."""
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) != 1 or not self.door.knows_host(headers["host"]):
            return PlainTextResponse("This server does not answer to that host name.", 400)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("Only GET, HEAD and POST.", 405, {"Allow": "GET, HEAD, POST"})
        site, is_navigation = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode") == "navigate"
        if site not in ("same-origin", "none") and not (is_navigation and scope["method"] == "GET"):
            return PlainTextResponse("Requests from other sites are rejected.", 403)
        unknown = self._unknown_visitor(scope, headers)
        if unknown is not None:
            return unknown
        if scope["method"] == "POST" and not self._from_our_page(headers):
            return PlainTextResponse("The request did not come from a page of this server: reload the page.", 403)
        if scope["path"] in LOCAL_ONLY and not _is_from_this_machine(scope):
            advice = "use the page there, or through ssh -L."
            return PlainTextResponse(f"Only the machine that SureFit runs on may do this: {advice}", 403)
        return None

    def _unknown_visitor(self, scope: Scope, headers: Headers) -> Response | None:
        """Return None for a valid cookie, a redirect that sets the cookie for a valid token, else a 401 response."""
        if self.door.admits(_cookie(headers, self.door.cookie)):
            return None
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        token = query.pop("token", None)
        if scope["method"] == "GET" and token is not None and self.door.admits(token):
            path = "/" + scope["path"].lstrip("/")
            redirect = RedirectResponse(f"{path}?{urlencode(query)}" if query else path, 303)
            redirect.set_cookie(self.door.cookie, self.door.token, httponly=True, samesite="strict", path="/")
            return redirect
        return PlainTextResponse("Open the address that `surefit ui` printed, with its token.", 401)

    def _from_our_page(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{headers['host']}":
            return False
        return constant_time_equal(headers.get("x-csrf-token", ""), self.door.csrf)


def _is_from_this_machine(scope: Scope) -> bool:
    host = (scope.get("client") or ("", 0))[0]
    return is_loopback(host.removeprefix("::ffff:"))


def _cookie(headers: Headers, name: str) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return morsel.value if morsel else None


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body; None as soon as it is too large."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        chunk: bytes = message.get("body", b"")
        body += chunk
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body"):
            return body


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body again, as if it had not been read."""
    replayed = False

    async def wrapped() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return wrapped


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return wrapped
