"""An S3 API on loopback that counts the requests it gets."""

import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

ACCOUNT = "123456789012"
"""The one that moto gives every caller."""


@dataclass
class CountingServer:
    """A running server.

    Attributes:
        endpoint: its URL.
        bucket: a name that no other test uses, since servers in one process share their content.
        requests: method and path of each request so far, query included.
    """

    endpoint: str
    bucket: str = field(default_factory=lambda: f"checkpoints-{uuid.uuid4().hex[:8]}")
    requests: list[str] = field(default_factory=list)

    def fill(self, keys: Iterable[str], content: bytes = b"x") -> None:
        """Put small objects without going through the network, which takes 10 ms each."""
        backend = s3_backends[ACCOUNT]["aws"]
        for key in keys:
            backend.put_object(self.bucket, key, content)

    def lists_since(self, start: int) -> list[str]:
        return [request for request in self.requests[start:] if "list-type=2" in request]


@contextmanager
def s3_server() -> Iterator[CountingServer]:
    moto = DomainDispatcherApplication(create_backend_app)
    server = CountingServer(endpoint="")

    def counted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        server.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query}")
        return moto(environ, start_response)  # type: ignore[no-any-return]

    http = make_server("127.0.0.1", 0, counted, threaded=True)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
