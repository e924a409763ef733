"""A tab of torch's debug server (``torch.distributed.debug``): where each rank is, and who waits for whom.

    from torch.distributed.debug import start_debug_server
    from asyncdist.torch_backend.debug_tab import debug_handlers

    start_debug_server(handlers=debug_handlers())       # http://host-of-rank-0:25999/asyncdist

The back end registers a function with torch's worker server, which every rank runs (`registration.serve_recorders`). The
page of rank 0's server asks all ranks for their flight recorders. Torch's server needs jinja2, tabulate and aiohttp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncdist.kernel.c10d_private import DebugHandler, NavLink, Route, default_handlers, fetch_all
from asyncdist.kernel.tracing.desync_report import ranks_in_words, tell
from asyncdist.kernel.tracing.job_status import RankStatus, quantity, statuses, wait_edges
from asyncdist.kernel.tracing.trace_record import TraceRecord, parse
from asyncdist.torch_backend.torch_group import NAME

_CALLS = 400
"""The number of completed calls that each rank sends."""
_PATIENCE = 5.0
"""Seconds to wait for a rank that does not answer, because it is stopped or holds the interpreter's lock."""
_ABSENT = "did not answer: ended, stopped, or busy in code that holds the interpreter's lock"
_TEMPLATE = Path(__file__).with_name("debug_tab.html")


def debug_handlers() -> list[Any]:
    """Return asyncdist's tab and torch's, for ``start_debug_server(handlers=...)``."""
    return [DebugTab(), *default_handlers()]


class DebugTab(DebugHandler):  # type: ignore[misc]
    """The tab *asyncdist*."""

    def routes(self) -> list[Any]:
        return [Route(f"/{NAME}", self._page)]

    def nav_links(self) -> list[Any]:
        return [NavLink(f"/{NAME}", NAME)]

    def templates(self) -> dict[str, str]:
        return {_TEMPLATE.name: _TEMPLATE.read_text(encoding="utf-8")}

    def dump(self) -> str:
        """Return the text that torch's server writes periodically, with ``enabled_dumps={"asyncdist"}``."""
        worlds, problems = self._fetch()
        lines = [f"rank {rank}: {problem}" for rank, problem in problems.items()]
        for records in worlds:
            lines += [*tell(records, _ABSENT), *map(_line, statuses(records)), ""]
        return "\n".join(lines)

    def dump_filename(self) -> str:
        return NAME

    def _page(self, request: Any) -> bytes:
        worlds, problems = self._fetch()
        shown = []
        for records in worlds:
            found = statuses(records)
            silent = sorted(set(range(records[0].world_size)) - {record.rank for record in records})
            shown.append(
                {
                    "id": records[0].world[:8],
                    "size": records[0].world_size,
                    "ranks": found,
                    "pending": [status.rank for status in found if status.state == "pending"],
                    "silent": silent,
                    "edges": wait_edges(found),
                    "story": list(tell(records, _ABSENT)),
                }
            )
        refresh = request.get_query_arg("refresh", default=0, type=int)
        page: bytes = request.frontend.render_template(
            _TEMPLATE.name, worlds=shown, problems=problems, refresh=refresh, quantity=quantity
        )
        # Torch's page does not name its encoding.
        return page.decode().encode("ascii", "xmlcharrefreplace")

    def _fetch(self) -> tuple[list[list[TraceRecord]], dict[int, str]]:
        """Return the records by world, and why ranks have sent none."""
        _, responses = fetch_all(NAME, f"calls={_CALLS}", timeout=min(self.fetch_timeout, _PATIENCE))
        worlds: dict[str, list[TraceRecord]] = {}
        problems = {}
        for rank, response in enumerate(responses):
            if response.status_code != 200:
                problems[rank] = response.text
                continue
            for content in response.json():
                record = parse(content)
                worlds.setdefault(record.world, []).append(record)
        return sorted(worlds.values(), key=lambda records: -records[0].world_size), problems


def _line(status: RankStatus) -> str:
    call = status.call
    doing = f"{call.call} #{call.seq} of {call.group!r} {status.state}" if call else status.state
    awaited = f", waits for {ranks_in_words(status.waits_for)}" if status.waits_for else ""
    remarks = "".join(f"; {remark}" for remark in status.remarks)
    since = f"{status.seconds or 0.0:.1f} s"
    return f"rank {status.rank} ({status.host}, process {status.pid}): {doing}, {since}{awaited}{remarks}"
