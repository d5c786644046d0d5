"""An S3 API on loopback that counts the requests it gets."""

import os
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import fsspec
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

_MOTO = DomainDispatcherApplication(create_backend_app)

ACCOUNT = "123456789012"
"""The one that moto gives every caller."""


@dataclass
class CountingServer:
    """A running server.

    Attributes:
        endpoint: its URL.
        bucket: a name that no other test uses, since servers in one process share their content.
        requests: method and path of each request so far, query included.
        faults: asked before every request; the first that gives an answer is the server's.
        ignores_conditions: what is to be created is overwritten instead.
    """

    endpoint: str
    bucket: str = field(default_factory=lambda: f"checkpoints-{uuid.uuid4().hex[:8]}")
    requests: list[str] = field(default_factory=list)
    faults: list["WireFault"] = field(default_factory=list)
    ignores_conditions: bool = False

    def fill(self, keys: Iterable[str], content: bytes = b"x") -> None:
        """Put small objects without going through the network, which takes 10 ms each."""
        backend = s3_backends[ACCOUNT]["aws"]
        for key in keys:
            backend.put_object(self.bucket, key, content)

    def lists_since(self, start: int) -> list[str]:
        return [request for request in self.requests[start:] if "list-type=2" in request]


@dataclass
class WireFault:
    """What happens to some requests between client and server.

    Attributes:
        method: how the request must begin.
        inside: what it must contain.
        count: how many of them it happens to.
        kind: "503", "reset" (the connection is cut off), "silence" (no answer for a long time) or
            "lost" (it is done, and the connection is cut off before the answer).
        seen: how many it has happened to.
    """

    method: str
    inside: str
    count: int
    kind: Literal["503", "reset", "silence", "lost"]
    silence_s: float = 30.0
    seen: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def answer(
        self, request: str, environ: dict[str, Any], start_response: Any
    ) -> Iterable[bytes] | None:
        if not request.startswith(self.method) or self.inside not in request:
            return None
        if self.seen >= self.count:
            return None
        self.seen += 1
        if self.kind == "503":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"]
        if self.kind == "silence":
            self.released.wait(self.silence_s)
        elif self.kind == "lost":
            list(_MOTO(environ, lambda *_: None))
        with suppress(OSError):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response("500 Nobody Reads This", [])
        return []


@contextmanager
def s3_server() -> Iterator[CountingServer]:
    server = CountingServer(endpoint="")

    def counted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query}"
        server.requests.append(request)
        if server.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        for fault in server.faults:
            if (answer := fault.answer(request, environ, start_response)) is not None:
                return answer
        return _MOTO(environ, start_response)  # type: ignore[no-any-return]

    http = make_server("127.0.0.1", 0, counted, threaded=True)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        for fault in server.faults:
            fault.released.set()
        http.shutdown()
        thread.join()


def other_endpoint() -> str | None:
    """The server to test against instead of the one in this process, if there is one."""
    return os.environ.get("KETTLE_S3_ENDPOINT")


def as_s3_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process credentials, the environment's own where it has some, and no endpoint."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, os.environ.get(name, "test"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", os.environ.get("AWS_DEFAULT_REGION", "us-east-1"))
    monkeypatch.setattr(fsspec.config, "conf", {})
