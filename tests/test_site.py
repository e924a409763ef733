"""Tests of the documentation site as `make docs` builds it. They need MkDocs, and those of its appearance also Chromium."""

from __future__ import annotations

import functools
import html
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdist.base import release
from asyncdist.config import Config, settings
from tests.support.browser import CHROMIUM, browser
from tests.test_errors import KINDS, make

ROOT = Path(__file__).resolve().parent.parent
PHONE, DESKTOP = (390, 844), (1280, 900)
NODE = shutil.which("node")
pytestmark = pytest.mark.exhaustive
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def pages(site: Path) -> list[str]:
    names = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    # All decisions have the form of the first.
    return [name for name in names if not name.startswith("decisions/0") or name.startswith("decisions/0001")]


def anchors(text: str) -> set[str]:
    return {html.unescape(name) for name in re.findall(r'\bid="([^"]+)"', text)}


def test_errors_have_the_addresses_of_published_messages(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "PUBLISHED", "https://docs.example/")
    for kind in KINDS:
        name, _, anchor = str(make(kind)).rpartition(", or https://docs.example/")[2].partition("#")
        assert anchor in anchors(page(site, name))


@pytest.mark.parametrize("package", ["asyncdist", "sync", "store", "ddp", "rpc", "weights", "torch_backend"])
def test_reference_shows_every_public_name(site: Path, package: str) -> None:
    module = importlib.import_module("asyncdist" if package == "asyncdist" else f"asyncdist.{package}")
    text = page(site, f"reference/{package}")
    # The names that both APIs have are links to the page of `asyncdist`.
    linked = re.findall(r'<a class="autorefs autorefs-internal"[^>]*><code>(\w+)</code>', text)
    shown = anchors(text) | {f"asyncdist.sync.{name}" for name in linked}
    assert {name for name in module.__all__ if f"{module.__name__}.{name}" not in shown} == set()


def test_settings_are_listed(site: Path) -> None:
    listed = anchors(page(site, "settings"))
    assert [variable for variable, *_ in settings(Config()) if variable.lower() not in listed] == []


def test_pages_need_no_other_host(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|link rel="(?:stylesheet|preload|icon|preconnect)")[^>]*(?:src|href)="(?:https?:)?//'
    )
    assert [path for path in site.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))] == []


def test_all_markdown_is_rendered(site: Path) -> None:
    code = re.compile(r"<(pre|code|svg|script)\b.*?</\1>", re.DOTALL)
    # A list or table directly below a paragraph, brackets of links, fences.
    raw = re.compile(r"<p>[^<]*\n(?:[-|]|\d+\.) |\]\(|\]\[|```|\*\*|^:::", re.MULTILINE)
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        found = raw.search(code.sub("", text))
        assert found is None, f"{path.relative_to(site)}: {found[0]}"


SEARCHES = {
    "ASYNCDIST_SPIN_US": "settings/",
    "bucket_cap_mb": "ddp/",
    "checkpoint": "training-loops/",
    "cuda": "gpu/",
    "custom transport": "writing-a-transport/",
    "deepspeed": "libraries/",
    "diloco": "low-communication/",
    "elastic": "membership/",
    "fsdp": "fsdp2-on-cpu/",
    "gloo": "moving-from-gloo/",
    "gradient accumulation": "training-loops/",
    "hang": "debugging/",
    "install": "install/",
    "mpi": "moving-from-mpi/",
    "nccl": "gpu/",
    "no_sync": "training-loops/",
    "parameter server": "rpc/",
    "PeerLostError": "errors/",
    "prometheus": "metrics/",
    "regroup": "membership/",
    "resume": "training-loops/",
    "slurm": "launching/",
    "straggler": "metrics/",
    "tcpstore": "quick-start-store/",
    "timeout": "awaiting/",
    "tls": "operating-the-store/",
    "torchrun": "launching/",
    "trio": "awaiting/",
    "uneven data": "training-loops/",
    "weights": "weights/",
}
"""What a user types, and the page that answers."""


@pytest.mark.skipif(NODE is None, reason="Node.js, which runs the site's search, is not installed")
def test_search_shows_the_page_for_users_among_the_first_three(site: Path) -> None:
    assert NODE is not None
    command = [NODE, ROOT / "tests/support/search.mjs", site, *SEARCHES]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    wrong = {query: found[query][:4] for query, right in SEARCHES.items() if right not in found[query][:3]}
    assert wrong == {}
    assert not any(address.startswith("source/") for addresses in found.values() for address in addresses)


@needs_browser
@pytest.mark.parametrize("size", [PHONE, (1440, 900)], ids=["phone", "desktop"])
async def test_figures_of_the_home_page_are_not_cut_off(address: str, size: tuple[int, int], tmp_path: Path) -> None:
    async with browser(tmp_path) as tab:
        await tab.show_on(*size, "light")
        await tab.open(address)
        boxes = (
            "[...document.querySelectorAll('.md-typeset__scrollwrap')].map(box => box.scrollWidth - box.clientWidth)"
        )
        assert await tab.evaluate(boxes) == [0]


@needs_browser
async def test_no_page_is_wider_than_a_phone(site: Path, address: str, tmp_path: Path) -> None:
    async with browser(tmp_path) as tab:
        await tab.show_on(*PHONE, "light")
        for name in pages(site):
            await tab.open(address + ("" if name == "." else f"{name}/"))
            assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


@needs_browser
async def test_colours_are_those_of_the_system(address: str, tmp_path: Path) -> None:
    async with browser(tmp_path) as tab:
        for scheme in ("light", "dark"):
            await tab.show_on(*DESKTOP, scheme)
            await tab.open(address)
            paper = await tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (min(paper) > 128) == (scheme == "light")


@needs_browser
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
async def test_search_finds_an_error(address: str, size: tuple[int, int], tmp_path: Path) -> None:
    async with browser(tmp_path) as tab:
        await tab.show_on(*size, "light")
        await tab.open(address)
        await tab.evaluate("document.querySelector('[data-md-toggle=search]').click()")
        await tab.evaluate("document.querySelector('.md-search__input').focus()")
        await tab.call("Input.insertText", text="OperationTimeoutError")
        first = "document.querySelector('.md-search-result__list a')?.href"
        found = await tab.evaluate(
            f"new Promise(resolve => {{ const look = () => {first} ? resolve({first}) : setTimeout(look, 20); look(); }})"
        )
        assert found.partition("?")[0] in (f"{address}errors/", f"{address}reference/errors/")
