"""asyncdist's tab of torch's debug server, on real ranks."""

import html
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_debugged.py"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SIZE = 4


class Page:
    """The tab as a browser gets it."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}/asyncdist"

    def text(self):
        """Return the page; empty while the server does not listen yet."""
        try:
            return urllib.request.urlopen(self.url).read().decode("ascii")
        except urllib.error.URLError:
            return ""

    def rows(self):
        return rows_of(self.text())


def rows_of(page):
    """Return the cells of each rank's row as text."""
    found = []
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        if cells:
            # Two adjacent elements are two words.
            found.append([" ".join(html.unescape(re.sub("<[^>]*>", " ", cell)).split()) for cell in cells])
    return found


@pytest.fixture
def stuck(nursery, until, tmp_path):
    """Four ranks, of which all but the last wait in their fourth all-reduce, and the page."""
    store_port, page_port = free_port(), free_port()
    # The server may wait for a stopped rank for as long as heartbeats do, and the others are to wait longer.
    environment = {"ASYNCDIST_HEARTBEAT": "60"}
    ranks = [
        nursery.start(PROGRAM, "debugged", rank, SIZE, store_port, page_port, str(tmp_path), environment=environment)
        for rank in range(SIZE)
    ]
    for rank in ranks:
        assert rank.hear() == "started"
    page = Page(page_port)
    for rank in ranks[:-1]:
        rank.say("all_reduce")
    until(lambda: [row[5] for row in page.rows()] == ["pending"] * 3 + ["idle"])
    yield ranks, page
    ranks[-1].say("all_reduce")
    for rank in ranks:
        assert rank.hear() == "done"
    assert [row[5] for row in page.rows()] == ["idle"] * SIZE
    for rank in ranks:
        rank.say("stop")
    for rank in ranks:
        assert rank.wait() == 0, rank.output()


def test_page_says_where_each_rank_is_and_who_waits_for_whom(stuck, until, tmp_path):
    ranks, page = stuck
    text = page.text()
    rows = rows_of(text)
    assert [(row[0], row[2], row[3], row[4], row[8], row[9]) for row in rows] == [
        *((str(rank), "world", "all_reduce(1000 x float32, SUM)", "4", "3", "") for rank in range(3)),
        ("3", "world", "all_reduce(1000 x float32, SUM)", "3", "", "0 1 2"),
    ]
    assert [row[1].split(", ")[1] for row in rows] == [str(rank.pid) for rank in ranks]
    assert [row[7] for row in rows] == ["4 kB"] * SIZE
    assert all(float(row[10]) > 0 for row in rows)
    story = html.unescape(text)
    assert "group 'world', collective #4: all_reduce(1000 x float32, SUM) has not completed." in story
    assert "rank 3 has not called it: the other ranks wait for it. Its last call was #3" in story

    # The server writes the same as text, periodically.
    line = f"process {ranks[2].pid}): all_reduce(1000 x float32, SUM) #4 of 'world' pending"
    until(lambda: any(line in path.read_text() for path in tmp_path.glob("asyncdist_*.txt")))


@pytest.mark.exhaustive
def test_stopped_rank_is_shown_as_silent(stuck):
    ranks, page = stuck
    ranks[3].stop()
    try:
        text = page.text()
    finally:
        ranks[3].resume()
    rows = rows_of(text)
    assert rows[3] == ["3", "did not answer"]
    assert [row[8] for row in rows[:3]] == ["3"] * 3
    assert "Nothing is known about rank 3 of this group." in html.unescape(text)


@pytest.mark.exhaustive
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_browser_shows_the_page(stuck, tmp_path):
    _, page = stuck
    assert CHROMIUM is not None
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1480,1080", "--hide-scrollbars",
    ]  # fmt: skip
    picture = tmp_path / "page.png"
    subprocess.run([CHROMIUM, *options, f"--screenshot={picture}", page.url], check=True, capture_output=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = subprocess.run([CHROMIUM, *options, "--dump-dom", page.url], check=True, capture_output=True, text=True)
    assert [row[5] for row in rows_of(shown.stdout)] == ["pending"] * 3 + ["idle"]
    assert shown.stdout.count('class="edge"') == 1
