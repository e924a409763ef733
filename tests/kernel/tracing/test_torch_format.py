"""Dumps in the format of torch's flight recorder."""

import asyncio
import json
import pickle

import torch

from asyncdist.config import Config
from asyncdist.kernel.tracing import desync_report, torch_format
from asyncdist.testing.cluster import world_of


async def dumped(groups, folder):
    """Return the content of each rank's file."""
    for group in groups:
        group.endpoint.recorder.dump(str(folder), "as a test")
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("torch-trace-*"))]


async def test_sizes_dtypes_and_states_of_calls(tmp_path):
    async with world_of(2, config=Config(dump_format="torch")) as groups:
        gathered = [[torch.ones(3), torch.ones(3)] for _ in groups]
        await asyncio.gather(*(g.all_gather(out, torch.ones(3)) for g, out in zip(groups, gathered, strict=True)))
        uneven = [[torch.ones(1), torch.ones(2)] for _ in groups]
        await asyncio.gather(
            *(g.all_gather(out, torch.ones(g.rank() + 1)) for g, out in zip(groups, uneven, strict=True))
        )
        pending = groups[0].all_reduce(torch.ones(2, 2, dtype=torch.int64))
        first, second = await dumped(groups, tmp_path)
        await asyncio.gather(groups[1].all_reduce(torch.ones(2, 2, dtype=torch.int64)), pending)
    assert first["version"] == "2.10"
    assert first["pg_config"]["world"] == {"name": "world", "desc": "default_pg", "ranks": "[0, 1]"}
    assert first["pg_status"]["0"]["last_completed_collective"] == 2
    shown = [(e["profiling_name"], e["input_sizes"], e["output_sizes"], e["state"]) for e in first["entries"]]
    assert shown == [
        ("gloo:all_gather", [[3]], [[6]], "completed"),
        ("gloo:all_gather_v", [[]], [[3]], "completed"),
        ("gloo:all_reduce", [[4]], [[4]], "started"),
    ]
    assert first["entries"][2]["input_dtypes"] == ["Long"]
    assert first["entries"][2]["time_discovered_completed_ns"] is None
    assert [entry["collective_seq_id"] for entry in second["entries"]] == [1, 2]


async def test_gather_whose_blocks_travel_in_runs_has_the_name_of_the_others(tmp_path):
    async with world_of(4, transport="tcp", config=Config(dump_format="torch")) as groups:
        await asyncio.gather(*(group.all_gather_single(torch.ones(12), torch.ones(3)) for group in groups))
        dumps = await dumped(groups, tmp_path)
    for dump in dumps:
        (entry,) = dump["entries"]
        assert (entry["profiling_name"], entry["input_sizes"]) == ("gloo:all_gather", [[3]])


async def test_pending_messages_have_a_group_of_their_own(tmp_path):
    async with world_of(3, config=Config(dump_format="torch")) as groups:
        pending = groups[0].recv(torch.ones(5), 2, tag=7)
        dumps = await dumped(groups, tmp_path)
        await asyncio.gather(groups[2].send(torch.ones(5), 0, tag=7), pending)
    (entry,) = dumps[0]["entries"]
    name, _ = entry["process_group"]
    assert name == "world: messages from rank 2 to rank 0, tag 7"
    assert dumps[0]["pg_config"][name]["ranks"] == "[0, 2]"
    assert (entry["profiling_name"], entry["output_sizes"], entry["is_p2p"]) == ("gloo:recv 0<-1", [[5]], True)
    assert not dumps[2]["entries"]


async def test_collectives_that_one_rank_has_evicted_are_left_out(tmp_path):
    async with world_of(2, config=Config(dump_format="both", flight_recorder_size=4)) as groups:
        for _ in range(3):
            await asyncio.gather(*(group.barrier() for group in groups))
        # The messages evict two barriers from each recorder.
        for _ in range(3):
            message = groups[0].send(torch.ones(1), 1)
            await asyncio.gather(message, groups[1].recv(torch.ones(1), 0))
        (first, _) = await dumped(groups, tmp_path)
    (records,) = desync_report.read(tmp_path)
    evicted = torch_format.evicted_collectives(records)
    assert evicted == set()
    (entry,) = first["entries"]
    assert (entry["collective_seq_id"], entry["record_id"]) == (3, 2)
    path = next(iter(sorted(tmp_path.glob("*.json"))))
    content = json.loads(path.read_text())
    content["entries"] = [each for each in content["entries"] if each["op"] != "barrier"]
    path.write_text(json.dumps(content))
    (records,) = desync_report.read(tmp_path)
    evicted = torch_format.evicted_collectives(records)
    assert evicted == {("world", 3)}
    assert not any(pickle.loads(torch_format.torch_pickle(record, evicted))["entries"] for record in records)
