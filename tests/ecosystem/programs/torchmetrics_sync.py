"""torchmetrics: states that are summed, averaged, concatenated with uneven lengths, in a subgroup and in every step."""

import torch
import torch.distributed as dist
from regression import report
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.text import WordErrorRate

import asyncdist.torch_backend

dist.init_process_group("asyncdist")
rank, world_size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(3)
targets = torch.randint(0, 3, (40,), generator=generator)
scores = torch.randn(40, 3, generator=generator).softmax(dim=1)
mine = slice(0, 25) if rank == 0 else slice(25, 40)  # of uneven length


def classify(part: slice) -> dict[str, torch.Tensor]:
    """Return the classification metrics of a part of the samples; torchmetrics combines the parts of all ranks."""
    metrics = MetricCollection(
        {"accuracy": MulticlassAccuracy(3), "confusion": MulticlassConfusionMatrix(3), "seen": CatMetric()}
    )
    area, largest, mean = BinaryAUROC(), MaxMetric(), MeanMetric()
    error, pearson, spearman = MeanSquaredError(), PearsonCorrCoef(), SpearmanCorrCoef()
    for begin in range(part.start, part.stop, 5):
        batch = slice(begin, begin + 5)
        for name in ("accuracy", "confusion"):
            metrics[name].update(scores[batch], targets[batch])
        metrics["seen"].update(targets[batch].float())
        area.update(scores[batch, 0], (targets[batch] == 0).int())
        largest.update(scores[batch])
        mean.update(scores[batch, 0], weight=targets[batch] + 1)
        for metric in (error, pearson, spearman):
            metric.update(scores[batch, 0], targets[batch].float())
    scalars = {"area": area, "largest": largest, "mean": mean, "error": error, "pearson": pearson, "spearman": spearman}
    return {**metrics.compute(), **{name: metric.compute() for name, metric in scalars.items()}}


together = classify(mine)
pair = dist.new_group([0, 1])
in_group = MeanSquaredError(process_group=pair)
in_group.update(scores[mine, 0], targets[mine].float())
stepwise = MeanMetric(dist_sync_on_step=True)
steps = [stepwise(torch.tensor(float(rank + step))).item() for step in range(3)]
empty = CatMetric()
if rank == 0:
    empty.update(torch.arange(3.0))
words = WordErrorRate()
spoken, written = [("a tensor is sent", "a tensor was sent"), ("two ranks", "two ranks wait")][rank]
words.update([spoken], [written])
report(
    **together, grouped=in_group.compute(), steps=steps, words=words.compute(), uneven=empty.compute(),
)  # fmt: skip
grouped = in_group.compute()
dist.destroy_process_group()
alone = classify(slice(0, 40))
torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(grouped, alone["error"])
