"""Weights: a trainer publishes the parameters of a model, and inference servers use them without a pause.

    async with weights.Publisher(model, job="asyncdist://10.0.0.1:29500/digits") as publisher:
        version = await publisher.publish(step)

    async with weights.Subscriber(like=model, job="asyncdist://10.0.0.1:29500/digits") as subscriber:
        async for version in subscriber:
            async with subscriber.swap(version) as new:
                ...

Publishers and subscribers are in no group. They find each other in the store of the job, and come and go at any time.
`asyncdist.sync.weights` has the same classes with calls that block.

Read in this order: in `content`, `digest`, `difference`, `layout` and `selection`; in `transfer`, `version_table` (the
store), `fan_out` (who copies from whom), `segments` and `held_version` (memory), `serving` and `pulling` (both ends of a
transfer), and `exchange`; then `model_copies`, `publisher` and `subscriber`.
"""

from asyncdist.weights.errors import DigestError, PublisherReplacedError, WeightsError
from asyncdist.weights.publisher import Publisher
from asyncdist.weights.subscriber import Subscriber
from asyncdist.weights.transfer.version_table import ReaderStatus, Version

__all__ = [
    "DigestError", "Publisher", "PublisherReplacedError", "ReaderStatus", "Subscriber", "Version", "WeightsError",
]  # fmt: skip
