"""Guard of the web page: allowed origins and host names, and the limit of all uploads."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cofima.classifier.web.guard import Guard


def asked(guard: Guard, method: str = "GET", path: str = "/", kind: str = "http", **headers: str) -> int:
    """Return the status of the answer; 200 if the page got the request."""
    named = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": kind, "method": method, "path": path, "headers": named}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return int(sent[0].get("status") or sent[0]["code"])


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def guard(uploads: Path, host: str = "127.0.0.1", names: tuple[str, ...] = (), most: int = 1000) -> Guard:
    return Guard(page, host=host, names=names, uploads=uploads, most=most)


OWN = ["127.0.0.1:7860", "localhost:7860", "LOCALHOST", "[::1]:7860"]
STRANGE = [
    "evil.example",
    "evil.example:7860",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    "[::1",
    "@",
]


@pytest.mark.parametrize("host", OWN)
def test_its_own_names_are_served(host: str, tmp_path: Path) -> None:
    assert asked(guard(tmp_path), host=host) == 200
    assert asked(guard(tmp_path), host=host, origin=f"http://{host}") == 200


@pytest.mark.parametrize("host", [*STRANGE, "192.168.0.7"])
def test_other_names_are_refused_as_after_dns_rebinding(host: str, tmp_path: Path) -> None:
    assert asked(guard(tmp_path), host=host) == 403
    assert asked(guard(tmp_path), kind="websocket", host=host) == 1008
    assert asked(guard(tmp_path)) == 403  # none at all


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:7860", "http://[::1", ""],
)
def test_other_sites_are_refused_whatever_name_they_use(origin: str, tmp_path: Path) -> None:
    answer = asked(guard(tmp_path), "POST", host="127.0.0.1:7860", origin=origin, content_length="2")
    assert answer == 403


def test_for_the_whole_machine_addresses_and_given_names_are_served(tmp_path: Path) -> None:
    wide = guard(tmp_path, "0.0.0.0", ("models.example.org",))
    for host in ("192.168.0.7:7860", "[fe80::1]:7860", "models.example.org", "Models.Example.Org:443"):
        assert asked(wide, host=host) == 200
    assert asked(wide, host="127.0.0.1:7860", origin="https://models.example.org") == 200  # behind a proxy
    assert asked(wide, host="evil.example") == 403


def test_uploads_are_bounded_in_total_also_those_that_are_arriving(tmp_path: Path) -> None:
    one = guard(tmp_path)
    upload: dict[str, Any] = {"method": "POST", "path": "/gradio_api/upload", "host": "localhost"}
    assert asked(one, **upload, content_length="1000") == 200
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(600))
    assert asked(one, **upload, content_length="400") == 200
    assert asked(one, **upload, content_length="401") == 413
    one.arriving = 300
    assert asked(one, **upload, content_length="101") == 413
    assert asked(one, **upload, content_length="100") == 200
    assert one.arriving == 300
    assert asked(one, **upload) == 411  # of any length
    assert asked(one, "POST", "/gradio_api/queue/join", host="localhost", content_length="1000001") == 413
    assert asked(one, "POST", "/gradio_api/queue/join", host="localhost", content_length="1000000") == 200
