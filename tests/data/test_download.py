"""Downloads from a server of our own: resumed, checked, never half there."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from torchmdnet2.data.datasets.base import DownloadFile, fetch
from torchmdnet2.errors import BadData

CONTENT = bytes(range(256)) * 5000
SHA256, MD5 = hashlib.sha256(CONTENT).hexdigest(), hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def server():
    """Serves CONTENT; `server.stop_after` breaks the connection, `server.ranges` tells whether parts are served."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/file":
                return self.send_error(404)
            first = 0
            if server.ranges and "Range" in self.headers:
                first = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
                if first >= len(CONTENT):
                    return self.send_error(416)
            server.asked.append(first)
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(CONTENT) - first))
            self.end_headers()
            self.wfile.write(CONTENT[first : first + (server.stop_after or len(CONTENT))])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.ranges, server.stop_after, server.asked = True, None, []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def source(server):
    return lambda path="file", **checksums: DownloadFile(
        f"http://127.0.0.1:{server.server_port}/{path}", "f.npz", **checksums
    )


@pytest.mark.parametrize("checksums", [{"sha256": SHA256}, {"md5": MD5}, {"sha256": SHA256[:12]}])
def test_downloaded_once(tmp_path, server, source, checksums):
    said = []
    path = fetch(source(**checksums), tmp_path / "raw", say=said.append)
    assert path.read_bytes() == CONTENT and [p.name for p in path.parent.iterdir()] == ["f.npz"]
    assert len(said) == 1 and "downloading" in said[0]
    assert fetch(source(**checksums), tmp_path / "raw") == path and server.asked == [0]


def test_without_a_checksum_the_sha256_is_told(tmp_path, source):
    said = []
    fetch(source(), tmp_path, say=said.append)
    assert f"f.npz: the file cannot be verified, because no checksum is published; its sha256 is {SHA256}" in said[-1]


@pytest.mark.parametrize("ranges", [True, False])
def test_going_on_after_a_break(tmp_path, server, source, ranges):
    server.stop_after = 500_000
    with pytest.raises(OSError, match=r"broke off after 500000 of 1280000 bytes; try again, .*f\.npz"):
        fetch(source(sha256=SHA256), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["f.npz.part"]
    server.stop_after, server.ranges = None, ranges
    assert fetch(source(sha256=SHA256), tmp_path).read_bytes() == CONTENT
    assert server.asked == [0, 500_000 if ranges else 0]


def test_complete_but_not_renamed(tmp_path, source):
    (tmp_path / "f.npz.part").write_bytes(CONTENT)
    assert fetch(source(md5=MD5), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("checksums", [{"sha256": "0" * 64}, {"md5": "0" * 32}])
def test_something_else_is_removed(tmp_path, source, checksums):
    with pytest.raises(
        BadData, match=r"f\.npz: its \w+ is .* and should be 000.*the file differs from the published one"
    ):
        fetch(source(**checksums), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_downloaded(tmp_path, source):
    with pytest.raises(OSError, match="cannot be downloaded: HTTP Error 404"):
        fetch(source("other"), tmp_path)
    with pytest.raises(BadData, match="only http and https"):
        fetch(DownloadFile("file:///etc/passwd", "f"), tmp_path)
    with pytest.raises(FileNotFoundError, match="it can be downloaded from http"):
        fetch(source(), tmp_path, download=False)


def test_a_file_that_serves_as_well(tmp_path):
    (tmp_path / "own.npz").write_bytes(b"x")
    source = DownloadFile("https://nowhere.invalid/f", "f.tar", instead=("own.npz",))
    assert fetch(source, tmp_path) == tmp_path / "own.npz"
