import gzip
import hashlib
import http.server
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from scalla.data import images as images_module
from scalla.data import load
from scalla.data.download import SOURCES, RemoteFile, Source, download_file, file_digest
from scalla.types import FileFormatError, InputError

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Server:
    """A tiny web server's files, its manners, and what it was asked for."""

    url: str
    files: dict[str, bytes]
    ranges: bool = True
    #: the connection is cut after so many bytes of each of the next answers
    cuts: list[int] = field(default_factory=list)
    chunked: bool = False
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            asked_range = self.headers.get("Range")
            state.asked.append((self.path, asked_range))
            content = state.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = int(asked_range.removeprefix("bytes=").removesuffix("-")) if asked_range else 0
            if not state.ranges:
                start = 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if not state.chunked:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body = content[start:]
            self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{httpd.server_address[1]}", {"/file.gz": CONTENT})
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def fetch(server: Server, folder: Path, **options: object) -> Path:
    return download_file(f"{server.url}/file.gz", folder / "sub" / "file.gz", MD5, progress_bar=False, **options)


def test_whole_file(server: Server, tmp_path: Path) -> None:
    path = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["file.gz"]  # no .part left
    assert server.asked == [("/file.gz", None)]


def test_progress_is_shown_on_request(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fetch(server, tmp_path)
    assert capsys.readouterr().err == ""
    download_file(f"{server.url}/file.gz", tmp_path / "again.gz", MD5)
    assert "again.gz" in capsys.readouterr().err


def test_cut_connections_are_resumed(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 50_000]
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_what_came_is_kept_for_the_next_call(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000]
    with pytest.raises(InputError, match="ended after 100,000 of 300,000 bytes; 100,000 bytes are kept"):
        fetch(server, tmp_path, attempts=1)
    assert not (tmp_path / "sub" / "file.gz").exists()
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == ("/file.gz", "bytes=100000-")


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [100_000]
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_part_that_is_whole_already(server: Server, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file.gz.part").write_bytes(CONTENT)
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/file.gz", "bytes=300000-")]  # answered by 416


@pytest.mark.parametrize("size", [1000, 300_000, 400_000])
def test_the_remains_of_another_file_are_replaced(server: Server, tmp_path: Path, size: int) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file.gz.part").write_bytes(bytes(size))
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_wrong_md5(server: Server, tmp_path: Path) -> None:
    server.files["/file.gz"] = b"something else"
    with pytest.raises(FileFormatError, match=f"got a file of md5 [0-9a-f]+, wanted {MD5}; it was deleted"):
        fetch(server, tmp_path)
    assert list((tmp_path / "sub").iterdir()) == []
    assert len(server.asked) == 1


def test_remains_of_another_file_and_no_attempt_left(server: Server, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file.gz.part").write_bytes(bytes(1000))
    with pytest.raises(FileFormatError, match="it was deleted"):
        fetch(server, tmp_path, attempts=1)
    assert fetch(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("chunked", [False, True])
def test_no_more_than_the_bound_is_written(server: Server, tmp_path: Path, chunked: bool) -> None:
    server.chunked = chunked  # no Content-Length: the bytes themselves are counted
    with pytest.raises(FileFormatError, match="250,000"):
        fetch(server, tmp_path, max_bytes=250_000)
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_missing_file_is_asked_for_once(server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(InputError, match=r"could not download http://127.*: the server answered 404 Not Found"):
        fetch(server, tmp_path)
    assert len(server.asked) == 1


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: a connection is refused
        url = f"http://127.0.0.1:{free.getsockname()[1]}/a"
        with pytest.raises(InputError, match=r"could not download http://127.*: no connection"):
            download_file(url, tmp_path / "a", MD5, progress_bar=False, timeout=5.0)


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wanted one that starts with http"):
        download_file("file:///etc/hostname", tmp_path / "a", MD5)
    (tmp_path / "occupied").write_text("a file, not a folder")
    with pytest.raises(InputError, match=r"cannot make the folder .*occupied.*set SCALLA_CACHE"):
        download_file("http://127.0.0.1:9/a", tmp_path / "occupied" / "a", MD5)


def idx_gz(array: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes(), mtime=0)


def test_load_downloads_what_is_not_found(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
    contents = (idx_gz(np.full((4, 28, 28), 51, np.uint8)), idx_gz(np.arange(4, dtype=np.uint8)))
    remote = [RemoteFile(n, hashlib.md5(c).hexdigest()) for n, c in zip(names, contents, strict=True)]
    server.files = {f"/{n}": c for n, c in zip(names, contents, strict=True)}
    monkeypatch.setitem(SOURCES, "KMNIST", Source(server.url, SOURCES["KMNIST"].train, (remote[0], remote[1])))
    monkeypatch.setattr(images_module, "NUM_IMAGES", {"train": 4, "test": 4})
    monkeypatch.delenv("SCALLA_DATA", raising=False)
    monkeypatch.delenv("SCALLA_OFFLINE", raising=False)
    monkeypatch.setenv("SCALLA_CACHE", str(tmp_path))
    for _ in range(2):  # the second time from the cache
        data = load("KMNIST", "test", progress_bar=False)
        assert data.labels.tolist() == [0, 1, 2, 3]
        assert data.images.unique().tolist() == pytest.approx([0.2])
        assert data.files[0].path == tmp_path / "KMNIST" / "raw" / names[0]
        assert data.files[0].md5 == remote[0].md5
    assert len(server.asked) == 2
    # The train split is not on this server.
    with pytest.raises(InputError) as caught:
        load("KMNIST", "train", progress_bar=False)
    message = str(caught.value)
    assert "holds the test split of KMNIST only" in message
    assert "the server answered 404" in message
    assert "SCALLA_DATA=<folder>" in message


def test_the_official_files() -> None:
    assert {name: len({f.md5 for f in s.train + s.test}) for name, s in SOURCES.items()} == dict.fromkeys(
        ("FashionMNIST", "MNIST", "KMNIST"), 4
    )
    assert all(len(f.md5) == 32 for s in SOURCES.values() for f in s.train + s.test)
    assert [f.name for f in SOURCES["MNIST"].test] == [
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ]


def test_file_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a", "md5") == "900150983cd24fb0d6963f7d28e17f72"
