"""Where torch's test files come from: a server, the cache, or a checkout."""

import http.server
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.upstream.upstream_files import FOLDER, SourceError, UpstreamFiles, blob_of, ref_of

CONTENT = "# Owner(s): [\"oncall: distributed\"]\nprint('Größe')\n".encode()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one file; counts requests; breaks off in the middle of another."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path == f"/v2.15.0/{FOLDER}/test_present.py":
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)
        elif self.path.endswith("test_truncated.py"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT) + 1))
            self.end_headers()
            self.wfile.write(CONTENT)
        elif self.path.endswith("test_refused.py"):
            self.send_error(429)
        else:
            self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server: its address, and the paths that were asked for."""
    requests: list[str] = []
    handler = type("Recording", (Handler,), {"requests": requests})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", requests
        httpd.shutdown()
        thread.join()


def test_fetched_file_has_the_served_bytes_and_is_fetched_once(server, tmp_path):
    url, requests = server
    files = UpstreamFiles("v2.15.0", tmp_path, url=url)
    path = files.obtain("test_present.py")
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert files.obtain("test_present.py") == path
    assert requests == [f"/v2.15.0/{FOLDER}/test_present.py"]


def test_file_that_a_release_does_not_have_is_none(server, tmp_path):
    assert UpstreamFiles("v2.13.0", tmp_path, url=server[0]).obtain("test_present.py") is None


@pytest.mark.parametrize("name", ["test_refused.py", "test_truncated.py"])
def test_incomplete_answer_is_an_error_and_leaves_no_file(server, tmp_path, name):
    with pytest.raises(SourceError, match=rf"{name} .*--source DIR with a checkout of pytorch at v2\.15\.0"):
        UpstreamFiles("v2.15.0", tmp_path, url=server[0]).obtain(name)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unreachable_server_is_an_error_that_says_what_to_do(server, tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        url = f"http://127.0.0.1:{httpd.server_port}"
    with pytest.raises(SourceError, match=r"could not be fetched.*Check the network, or pass --source DIR"):
        UpstreamFiles("v2.15.0", tmp_path, url=url).obtain("test_present.py")


def test_checkout_is_read_instead_of_the_network(server, tmp_path):
    url, requests = server
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "test_own.py").write_bytes(CONTENT)
    files = UpstreamFiles("v2.15.0", tmp_path / "cache", source=tmp_path, url=url)
    assert files.obtain("test_own.py") == tmp_path / FOLDER / "test_own.py"
    assert files.obtain("test_present.py") is None
    assert requests == []


def test_folder_that_is_no_checkout_is_an_error(tmp_path):
    with pytest.raises(SourceError, match=f"has no folder {FOLDER}: pass a checkout of pytorch at v2.15.0"):
        UpstreamFiles("v2.15.0", tmp_path, source=tmp_path).obtain("test_own.py")


def test_ref_is_the_tag_of_a_release_and_the_commit_of_another_build():
    assert ref_of("2.13.0+cpu", "cf30153c") == "v2.13.0"
    assert ref_of("2.16.0.dev20261101+cpu", "cf30153c") == "cf30153c"
    assert ref_of("2.16.0a0+gitcf30153", "cf30153c") == "cf30153c"


def test_blob_is_the_name_that_git_gives(tmp_path):
    path = tmp_path / "file.py"
    path.write_bytes(CONTENT)
    assert blob_of(path) == subprocess.check_output(["git", "hash-object", path], text=True).strip()
