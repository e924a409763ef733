"""What `torch.compile` and `torch.export` make of calls of the blocking API."""

import pytest
import torch

import asyncdist.sync as dist
from asyncdist.errors import UnsupportedError
from asyncdist.groups.default_world import default_group

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.compiler.reset()


def test_rank_and_size_are_constants_of_a_graph_until_they_change(monkeypatch):
    def scaled(tensor):
        return tensor * dist.get_world_size() + dist.get_rank()

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    graphs = []
    compiled = torch.compile(scaled, fullgraph=True, backend=counting)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [1.0, 1.0]
    assert len(graphs) == 1
    with monkeypatch.context() as patch:
        patch.setattr(default_group(), "ranks", (0, 1, 2, 3))
        patch.setattr(default_group(), "_rank", 3)
        assert compiled(torch.ones(1)).item() == 7.0
    assert len(graphs) == 2


def test_whole_graph_with_a_collective_is_refused_with_the_way_out():
    def reduce(tensor):
        dist.all_reduce(tensor)
        return tensor + 1

    assert torch.compile(reduce, backend="eager")(torch.ones(1)).item() == 2.0
    torch.compiler.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="asyncdist communicates between graphs: leave fullgraph=True out"
    ):
        torch.compile(reduce, fullgraph=True, backend="eager")(torch.ones(1))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_collective_is_refused_by_name(strict):
    class Reducing(torch.nn.Module):
        def forward(self, tensor):
            dist.all_reduce(tensor)
            return tensor + 1

    kind, words = UnsupportedError, "a FakeTensor has no"
    if strict:
        kind, words = torch._dynamo.exc.Unsupported, "asyncdist communicates between"
    with pytest.raises(kind, match=words):
        torch.export.export(Reducing(), (torch.ones(1),), strict=strict)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_refused_by_name(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for call in (lambda: dist.all_reduce(nested), lambda: dist.broadcast(nested, 0)):
        with pytest.raises(UnsupportedError, match=r"a nested tensor cannot|a torch\.jagged tensor"):
            call()
    dist.all_reduce(torch.ones(1))
