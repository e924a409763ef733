"""The names of the benchmark of data-parallel training: its parts, models and contenders. No torch here."""

from __future__ import annotations

from typing import NamedTuple

PARTS = {
    "steps": "training steps on one host",
    "small": "many small parameters, in a world of one",
    "sharded": "training steps of FSDP2 and tensor parallel on one host",
    "hosts": "training steps between two hosts",
    "memory": "memory above model, gradients and optimizer",
    "diloco": "training with few exchanges between two hosts",
}
"""The parts, with what they measure."""
ON_TWO_HOSTS = ("hosts", "diloco")


HEADS = 4
"""Attention heads of the transformer. The number of ranks must divide it for tensor parallel."""

MODELS = {
    "mlp": "an MLP of 6.3 M parameters, 16 inputs",
    "large": "an MLP of 25 M parameters, 16 inputs",
    "small": "1,000 parameters of 1 or 64 elements, 16 inputs",
    "transformer": "a transformer of 6.4 M parameters, 6 sequences of 64",
    "fsdp2": "FSDP2, a transformer of 3.2 M parameters, 2 sequences of 64 per rank",
    "tensor_parallel": "tensor parallel, a transformer of 3.2 M parameters, 2 sequences of 64",
    "convolutions": "a convolutional network of 24 M parameters, one picture",
}
"""The titles of the models, by name; `models` makes them."""

ALONE = "alone"
"""The contender that trains without communication, on all ranks at the same time. The others are compared with it."""
KEPT = "kept"
"""The contender that trains without communication and keeps its gradients from step to step, as buckets do."""
CONTENDERS = {
    "asyncdist": "asyncdist's `DistributedDataParallel`",
    "auto": '... with `bucket_cap_mb="auto"`',
    "tcp": "... over TCP",
    "bf16": "... with the hook `bf16`",
    "int8": '... with the hook `Quantized("int8")`',
    "torch": "stock PyTorch on asyncdist",
    "gloo": "stock PyTorch on gloo",
    ALONE: "without communication",
    KEPT: "... with gradients that are kept from step to step",
}
"""The contenders, with what they are."""
WITH_TORCH = {"torch": "asyncdist", "gloo": "gloo"}
"""The contenders that are torch's DDP, or what the model names instead, with their back ends."""
LOSSY = ("bf16", "int8")
"""The contenders that end with other weights."""


class StepsPart(NamedTuple):
    """Models and contenders of a part whose training steps are timed."""

    models: tuple[str, ...]
    contenders: tuple[str, ...]


STEPS = {
    "steps": StepsPart(("mlp", "large"), ("asyncdist", "auto", "tcp", "torch", "gloo", ALONE)),
    "small": StepsPart(("small",), ("asyncdist", "torch", "gloo", ALONE)),
    "sharded": StepsPart(("fsdp2", "tensor_parallel"), ("torch", "gloo", ALONE)),
    "hosts": StepsPart(("mlp", "transformer"), ("asyncdist", "auto", "bf16", "int8", "gloo", ALONE)),
}
"""The parts whose steps are timed."""
