"""The weight-transfer engines for vLLM, with a stand-in for vLLM's side."""

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


SOURCES = pytest.mark.parametrize(
    "source_of", [stand_in.ModuleSource, stand_in.OwnedModuleSource], ids=["0.32", "0.33"]
)


@SOURCES
def test_workers_load_their_parts_of_each_version(vllm, job, monkeypatch, source_of):
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 40))
    source = source_of(model)
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


@SOURCES
def test_other_ranks_of_the_trainer_take_part_in_the_collectives_only(vllm, job, source_of):
    source = source_of(torch.nn.Linear(3, 4))
    engine = trainer(vllm, job, None, source, rank=1)
    engine.send_weights()
    assert source.iterations == 1
    engine.shutdown()


def test_rank_0_owns_all_tensors_and_others_a_part_of_them(vllm, job):
    model = torch.nn.Linear(4, 4)
    owners = {"weight": (0, 1), "bias": (0, 2)}
    served = [worker(vllm, model, 0)]
    sender, other = (
        trainer(vllm, job, stand_in.WeightSyncClient(served), stand_in.OwnedModuleSource(model, owners, rank), rank)
        for rank in (0, 1)
    )
    sender.send_weights()
    other.send_weights()
    assert has(served[0], model)
    for each in (sender, other, *served):
        each.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_source_that_does_not_give_rank_0_whole_tensors_is_refused_on_each_rank(vllm, job, rank):
    source = stand_in.OwnedModuleSource(torch.nn.Linear(3, 4), {"bias": (1, 2)}, rank)
    with pytest.raises(UsageError, match=r"bias is owned by ranks 1, 2 of the trainer.*gather it in the source"):
        trainer(vllm, job, None, source, rank)
    with pytest.raises(UsageError, match=r"LocalSource yields parts of tensors only.*implement iter_full"):
        trainer(vllm, job, None, stand_in.LocalSource(), rank)


def test_plug_in_may_be_loaded_again(vllm):
    register = importlib.import_module("asyncdist.weights.adapters.vllm_engines").register_vllm_engines
    places = dict(vllm.workers.places), dict(vllm.trainers.places)
    register()
    assert (vllm.workers.places, vllm.trainers.places) == places


def test_wrong_use_is_named(vllm, job):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="source=ModuleSource"):
        trainer(vllm, job, None, None)
    engine = worker(vllm, model, 0)
    with pytest.raises(UsageError, match="knows no job"):
        engine.update_weights({"version": 1})
    with pytest.raises(ValueError, match="wrong fields"):
        engine.parse_init_info({"address": "10.0.0.1"})


def test_failed_entry_of_the_workers_ends_the_publisher(vllm, job):
    class Refusing(stand_in.WeightSyncClient):
        def init_weight_transfer_engine(self, init_info):
            raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        trainer(vllm, job, Refusing([]), stand_in.ModuleSource(torch.nn.Linear(3, 4)))
