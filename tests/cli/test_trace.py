"""``asyncdist trace`` on dumps of real worlds."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from asyncdist.cli import main, timeline
from asyncdist.config import Config
from asyncdist.errors import GroupError
from asyncdist.kernel.tracing import desync_report
from asyncdist.testing.cluster import world_of


@pytest.fixture
def dumps(tmp_path):
    """Dumps of a world in which rank 1 did not call the second collective."""

    async def fail():
        async with world_of(2, config=Config(dump_dir=str(tmp_path))) as groups:
            await asyncio.gather(*[group.all_reduce(torch.ones(3)) for group in groups])
            pending = [groups[0].broadcast(torch.ones(2), 0), groups[0].all_reduce(torch.ones(5))]
            await pending[0]
            groups[1].abort("the test aborts")
            with pytest.raises(GroupError):
                await pending[1]

    asyncio.run(fail())
    return tmp_path


@pytest.fixture
def worlds(dumps):
    """Dumps of that world, of a second world without calls, and of a third, older world."""
    for path in list(dumps.iterdir()):
        content = json.loads(path.read_text())
        content["groups"]["world"]["last"], content["entries"] = 0, []
        for world, age in (("idle" * 8, 1.0), ("old" * 8, 3600.0)):
            content |= {"world": world, "time": content["time"] - age}
            (dumps / f"asyncdist-{world[:8]}-rank{content['rank']}.json").write_text(json.dumps(content))
    return dumps


def trace(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_report_and_tables_name_the_missing_rank(dumps):
    run = trace(dumps, "--calls", 5)
    assert run.exit_code == 0, run.output
    assert "group 'world', collective #2: broadcast(2 x float32, root 0) has not completed." in run.output
    assert "rank 1 has not called it" in run.output
    stacks = run.output.partition("Python stacks of rank 1:")[2]
    assert "thread MainThread:" in stacks
    assert "asyncio.run(fail())" in stacks
    assert "Python stacks of rank 0" not in run.output
    (row,) = [line for line in run.output.splitlines() if "all_reduce(5 x float32, SUM)" in line]
    assert "pending for" in row
    assert "not called" in row


def test_json_has_the_report_and_where_each_rank_is(dumps):
    run = trace(dumps, "--json")
    assert run.exit_code == 0, run.output
    (world,) = json.loads(run.stdout)["worlds"]
    assert world["report"][0].startswith("group 'world', collective #2: broadcast(2 x float32, root 0)")
    (group,) = world["groups"]
    assert (group["group"], group["blocked_at"], world["late"]) == ("world", 2, [1])
    assert [(rank["completed"], rank["call"]) for rank in group["ranks"]] == [
        (2, "all_reduce(5 x float32, SUM)"),
        (1, None),
    ]
    (dumps / next(dumps.glob("*rank1.json"))).unlink()
    (world,) = json.loads(trace(dumps, "--json").stdout)["worlds"]
    assert world["groups"][0]["ranks"][1] == {"rank": 1, "dump": False}


def test_timeline_has_a_row_for_each_rank(dumps):
    run = trace(dumps, "--plot", dumps / "timeline.svg")
    assert run.exit_code == 0, run.output
    assert (dumps / "timeline.svg").read_text().startswith("<?xml")
    records = desync_report.read(dumps)
    (axes,) = timeline.timeline_figure(records).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[-1] == "not completed"
    assert names[:-1] == sorted(names[:-1])
    (axes,) = timeline.timeline_figure(records, seconds=1e-9).axes
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"not completed"}


def test_short_calls_do_not_hide_long_ones_in_the_timeline(dumps):
    """An all-reduce of a second lasts while 500 messages come and go, and after a barrier of a microsecond."""
    (record, _), *_ = desync_report.read(dumps)
    call, end = record.calls[0], record.written

    def traced(op, issued, seconds):
        return dataclasses.replace(call, op=op, issued=end - issued, finished=end - issued + seconds)

    messages = [traced("send", 1.0 - 0.002 * number, 1e-5) for number in range(1, 500)]
    calls = [traced("barrier", 1.0, 1e-6), traced("all_reduce", 1.0, 1.0), *messages, traced("broadcast", 3.0, 1e-5)]
    (axes,) = timeline.timeline_figure([[dataclasses.replace(record, calls=calls)]]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all_reduce", "broadcast"]
    bars = {bar.get_facecolor()[0].tobytes(): bar.get_paths() for bar in axes.collections}
    assert sorted(len(paths) for paths in bars.values()) == [1, 1]
    (long, short) = sorted((paths[0].get_extents() for paths in bars.values()), key=lambda box: -box.width)
    assert long.x1 - long.x0 == pytest.approx(1.0, abs=0.01)
    assert 0 < short.width < 0.01


def test_perfetto_file_has_every_call(dumps):
    run = trace(dumps, "--perfetto", dumps / "events.json")
    assert run.exit_code == 0, run.output
    events = json.loads((dumps / "events.json").read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in calls} == {0, 1}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in calls)
    assert [event["args"]["call"] for event in calls if event["pid"] == 1] == ["all_reduce(3 x float32, SUM)"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["empty"], "holds no flight recorder"),
        (["absent"], "does not exist"),
        ([".", "--plot", "timeline.nothing"], "its name must end in png, svg or pdf"),
        ([".", "--plot", "absent/timeline.svg"], "there is no folder 'absent'"),
        ([".", "--perfetto", "absent/events.json"], "there is no folder 'absent'"),
        pytest.param(
            [".", "--perfetto", "/dev/full"],
            "/dev/full cannot be written (No space left on device)",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full"),
        ),
    ],
)
def test_invalid_folder_or_output_is_named(dumps, monkeypatch, arguments, error):
    monkeypatch.chdir(dumps)
    Path("empty").mkdir()
    run = trace(*arguments)
    assert (run.exit_code, type(run.exception)) == (2, SystemExit)
    assert error in run.output


def test_markup_in_names_is_not_interpreted(dumps):
    for path in dumps.iterdir():
        content = json.loads(path.read_text())
        content["host"] = "[red]host"
        content["groups"] = {"[/tp]": content["groups"]["world"]}
        for entry in content["entries"]:
            entry.update(group="[/tp]", op="[bold]op", call=f"[/]{entry['call']}")
        path.write_text(json.dumps(content))
    run = trace(dumps, "--calls", 5, "--perfetto", dumps / "[b]events")
    assert run.exit_code == 0, run.output
    for name in ("group '[/tp]', collective", "group '[/tp]' ", "[red]host", "[bold]op", "[/]all_reduce", "[b]events"):
        assert name in run.output


def test_default_folder_is_the_dump_directory(dumps, monkeypatch):
    monkeypatch.setenv("ASYNCDIST_DUMP_DIR", str(dumps))
    assert "rank 1 has not called it" in trace().output
    monkeypatch.delenv("ASYNCDIST_DUMP_DIR")
    monkeypatch.chdir(dumps)
    assert "rank 1 has not called it" in trace().output


def test_worlds_that_wrote_together_are_reported_separately(worlds):
    run = trace(worlds, "--calls", 3)
    assert run.exit_code == 0, run.output
    assert run.output.count("the last calls in") == 1  # the other world has called nothing
    (stuck,) = {path.name.split("-")[1] for path in worlds.iterdir()} - {"idleidle", "oldoldol"}
    lines = run.output.splitlines()
    first, second = lines.index(f"world {stuck} of 2 ranks"), lines.index("world idleidle of 2 ranks")
    assert lines[first + 1].startswith(
        "group 'world', collective #2: broadcast(2 x float32, root 0) has not completed."
    )
    assert lines[second + 1].startswith("No collective is pending")
    assert "2 files of older worlds in" in lines[-1]
    assert "oldoldol" not in run.output


def test_timeline_has_a_panel_for_each_world(worlds):
    panels = timeline.timeline_figure(desync_report.recent(desync_report.read(worlds))).axes
    assert [panel.get_title(loc="left").partition(":")[0] for panel in panels][1:] == ["world idleidle"]
    assert [len(panel.get_yticks()) for panel in panels] == [2, 2]


def test_perfetto_file_has_different_processes_for_each_world(worlds):
    assert trace(worlds, "--perfetto", worlds / "events.json").exit_code == 0
    events = json.loads((worlds / "events.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names) == [0, 1, 2, 3]
    assert [name.split(", ")[1] for name in names.values()] == ["rank 0", "rank 1"] * 2
    assert names[2].startswith("world idleidle, ")
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
