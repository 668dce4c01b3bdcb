"""`eqfuse play`: a page with an editor, and what the compiler makes of the program in it.

It listens on 127.0.0.1 alone. Every request has a token in its path, which only the printed address has, and comes from a page of this
very address: others are refused. It gives out the page and what is compiled for it, and reads no file.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.console import Console

from eqfuse.errors import EqfuseError
from eqfuse.explain.page import template
from eqfuse.extract.devices import DEVICES
from eqfuse.loops.plan import WAYS
from eqfuse.play.compilation import Compilation, Limits, Request
from eqfuse.program_files import FIRST, shipped
from eqfuse.threads import Lock

AT_ONCE = 2
"""Compilations that run at the same time."""

LONGEST = 32 << 10
"""Bytes of a request: what a pipe holds that nobody reads yet."""

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load."""


def play(program: str | None, port: int, limits: Limits, console: Console) -> int:
    """Serves until Ctrl-C: 0. Raises EqfuseError where the port is taken."""
    try:
        server = Playground(program or FIRST, port, limits)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "give another one with --port, or none"
        raise EqfuseError(f"port {port} cannot be had: {reason}", hint=hint) from None
    console.print(server.address, markup=False, soft_wrap=True)
    given = f"{limits.seconds:g} seconds and {limits.memory >> 20} MB"
    console.print(f"each compilation has {given}, {AT_ONCE} run at once; Ctrl-C ends it", highlight=False)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    console.print("ended")
    return 0


class Playground(ThreadingHTTPServer):
    """The server: its page begins with a program."""

    daemon_threads = True

    def __init__(self, program: str, port: int, limits: Limits) -> None:
        self.program, self.limits = program, limits
        self.token = secrets.token_urlsafe(32)
        self.slots = threading.BoundedSemaphore(AT_ONCE)
        self._lock = Lock()
        self._started: set[Compilation] = set()
        self._idle: Compilation | None = None
        self._has_ended = False
        super().__init__(("127.0.0.1", port), _Handler)
        self.hosts = tuple(f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost"))
        self._made_ready()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{self.hosts[0]}/{self.token}/"

    def page(self, nonce: str) -> str:
        programs = shipped()
        return template("play").render(
            nonce=nonce,
            program=self.program,
            programs={
                "Gallery": {name: text for name, text in programs.items() if "." not in name},
                "eqfuse.ops": {name: text for name, text in programs.items() if "." in name},
            },
            devices=list(DEVICES),
            schedules=list(WAYS),
            longest=LONGEST,
        )

    def compile(self, request: bytes, caller: Any) -> dict[str, Any] | None:
        """The answer to a request; None where the caller has gone."""
        with self._lock:
            if self._has_ended:
                return None
            found, self._idle = self._idle, None
            if found is None or not found.is_alive:
                found = Compilation(self.limits)
                self._started.add(found)
        try:
            return found.answer(request, caller)
        finally:
            with self._lock:
                self._started.discard(found)
            self._made_ready()

    def _made_ready(self) -> None:
        """Has a process that has imported eqfuse before the next request."""
        with self._lock:
            if self._idle is None and not self._has_ended:
                self._idle = Compilation(self.limits)
                self._started.add(self._idle)

    def server_close(self) -> None:
        """Ends compilations too."""
        super().server_close()
        with self._lock:
            self._has_ended = True
            started, self._started = self._started, set()
        for compilation in started:
            compilation.end()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away before its answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: Playground
    timeout = 10
    server_version, sys_version = "eqfuse", ""

    def parse_request(self) -> bool:
        """Refuses what does not come from the page itself, whatever it asks for."""
        if not super().parse_request():
            return False
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        known = len(hosts) == 1 and hosts[0] in self.server.hosts
        own = not origins or (known and origins == [f"http://{hosts[0]}"])
        token = self.path.partition("?")[0].split("/")[1:2]
        named = token and secrets.compare_digest(token[0].encode(), self.server.token.encode())
        if known and own and named:
            return True
        self._say(HTTPStatus.FORBIDDEN, "forbidden: open the address that eqfuse play has printed\n")
        return False

    def do_GET(self) -> None:
        """The page, at the address that was printed."""
        if self._asked != "":
            self._say(HTTPStatus.NOT_FOUND, "there is nothing here\n")
            return
        nonce = secrets.token_urlsafe(16)
        self._say(HTTPStatus.OK, self.server.page(nonce), "text/html", POLICY.format(nonce=nonce))

    def do_POST(self) -> None:
        """What the compiler makes of a program: JSON to JSON."""
        if self._asked != "compile":
            self._say(HTTPStatus.NOT_FOUND, "there is nothing here\n")
            return
        body = self._body()
        if body is None:
            return
        if Request.of(body) is None:
            self._say(
                HTTPStatus.BAD_REQUEST, "a request is JSON: a program, and as text device, sizes, schedule\n"
            )
            return
        if not self.server.slots.acquire(blocking=False):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{AT_ONCE} programs are compiled already\n")
            return
        try:
            answer = self.server.compile(body, self.connection)
        finally:
            self.server.slots.release()
        if answer is not None:
            self._say(HTTPStatus.OK, json.dumps(answer), "application/json")

    @property
    def _asked(self) -> str:
        """The path behind the token."""
        return self.path.partition("?")[0].removeprefix(f"/{self.server.token}/")

    def _body(self) -> bytes | None:
        """The body of a request; None where it was refused."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json":
            self._say(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a request is application/json\n")
        elif not re.fullmatch("[0-9]{1,18}", length):
            self._say(HTTPStatus.LENGTH_REQUIRED, "a request says its length\n")
        elif int(length) > LONGEST:
            self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has {LONGEST} bytes at most\n")
        else:
            body = self.rfile.read(int(length))
            return body if len(body) == int(length) else None
        return None

    def _say(
        self, status: HTTPStatus, text: str, kind: str = "text/plain", policy: str = "default-src 'none'"
    ) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not printed."""
