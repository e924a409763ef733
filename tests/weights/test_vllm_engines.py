"""The weight-transfer engines for vLLM, with a stand-in for vLLM's side."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from asyncdist.errors import UsageError
from tests.support import vllm_stand_in as stand_in


@pytest.fixture
def vllm():
    installed = stand_in.install()
    importlib.import_module("asyncdist.weights.adapters.vllm_engines").register_vllm_engines()
    yield installed
    installed.remove()


def worker(vllm, model, half):
    """Make the engine of a worker, as vLLM does from its configuration."""
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    config = SimpleNamespace(parallel_config=None, model_config="the configuration of the model")
    served = stand_in.ServedModel(shapes, half)
    backend = SimpleNamespace(backend="asyncdist")
    return vllm.workers.create_engine(backend, config, torch.device("cpu"), served)


def trainer(vllm, job, client, source, rank=0):
    kind = importlib.import_module("asyncdist.weights.adapters.vllm_engines").AsyncdistTrainerInitInfo
    return vllm.trainers.trainer_init(kind(job=job, rank=rank), client=client, source=source)


def has(engine, model):
    half = engine.model.half
    return all(
        torch.equal(engine.model.loaded[name], tensor.chunk(2)[half]) for name, tensor in model.named_parameters()
    )


def test_workers_load_their_parts_of_each_version(vllm, job, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 40))
    source = stand_in.ModuleSource(model)
    engines = [worker(vllm, model, half) for half in (0, 1)]
    client = stand_in.WeightSyncClient(engines)
    engine = trainer(vllm, job, client, source)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        engine.send_weights()
        assert all(has(each, model) for each in engines)
    assert client.versions == ["1", "2", "3"]
    calls = [(call, engines[half].model) for call in ("initialize", "finalize") for half in (0, 1)]
    assert stand_in.reloads == 3 * calls
    monkeypatch.setenv("ASYNCDIST_HOST", "elsewhere")
    late = worker(vllm, model, 1)
    late.init_transfer_engine(late.parse_init_info({"job": job, "name": "weights"}))
    late.update_weights({"version": 3})
    assert has(late, model)
    engine.shutdown()
    for each in (*engines, late):
        each.shutdown()
        each.shutdown()


def test_other_ranks_of_the_trainer_take_part_in_the_collectives_only(vllm, job):
    source = stand_in.ModuleSource(torch.nn.Linear(3, 4))
    engine = trainer(vllm, job, None, source, rank=1)
    engine.send_weights()
    assert source.iterations == 1
    engine.shutdown()


def test_wrong_use_is_named(vllm, job):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="source=ModuleSource"):
        trainer(vllm, job, None, None)
    engine = worker(vllm, model, 0)
    with pytest.raises(UsageError, match="knows no job"):
        engine.update_weights({"version": 1})
    with pytest.raises(ValueError, match="wrong fields"):
        engine.parse_init_info({"address": "10.0.0.1"})
    with pytest.raises(ValueError, match="registered"):
        importlib.import_module("asyncdist.weights.adapters.vllm_engines").register_vllm_engines()


def test_failed_entry_of_the_workers_ends_the_publisher(vllm, job):
    class Refusing(stand_in.WeightSyncClient):
        def init_weight_transfer_engine(self, init_info):
            raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        trainer(vllm, job, Refusing([]), stand_in.ModuleSource(torch.nn.Linear(3, 4)))
