"""Times of one step with communication, and of its buckets. Recorded by `reducer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class BucketTimes:
    """Times of one bucket in a step, on the clock of `time.perf_counter` (seconds).

    Attributes:
        index: Place of the bucket in the order of the all-reduces.
        nbytes: Bytes of its gradients.
        ready: When its last gradient arrived.
        started: When its all-reduce started.
        finished: When its all-reduce was complete.
    """

    index: int
    nbytes: int
    ready: float = 0.0
    started: float = 0.0
    finished: float = 0.0

    def stop(self, _: object) -> None:
        """Record the end of the all-reduce."""
        self.finished = perf_counter()


@dataclass(slots=True)
class StepTimes:
    """Times of one forward and backward with communication, on the clock of `time.perf_counter` (seconds).

    Attributes:
        forward_started: When the forward of the wrapper began.
        backward_started: When autograd computed the gradient of the module's output.
        backward_finished: When autograd had computed all gradients.
        finished: When all all-reduces were complete and ``backward()`` returned.
        buckets: Times of each bucket, in the order of the all-reduces.
    """

    backward_started: float
    backward_finished: float = 0.0
    finished: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
    forward_started: float = 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the all-reduces' time that passed while autograd computed; 1 without all-reduces."""
        total = sum(bucket.finished - bucket.started for bucket in self.buckets)
        hidden = sum(max(0.0, min(each.finished, self.backward_finished) - each.started) for each in self.buckets)
        return hidden / total if total > 0.0 else 1.0
