"""The collectives of a group whose members share memory: selects the protocol of each call.

Small tensors use a `SmallExchange`, with one synchronisation. An all-reduce of registered tensors is a
`ZeroCopyAllReduce`. All other calls are staged in rounds (see `large`). All members select the same protocol: by the
sizes, and by whether the data is registered, which the members publish. `ShmTransport.native` makes one `ShmNative` per
group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from asyncdist.base.callables import Callback
from asyncdist.base.ops import Collective
from asyncdist.errors import GroupError
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.memory.buffers import Memory
from asyncdist.kernel.transport.native import CallSignature, Native, PreparedCall
from asyncdist_transports.shm.collectives import zero_copy
from asyncdist_transports.shm.collectives.large import Large
from asyncdist_transports.shm.collectives.slot_table import DONE, SlotTable
from asyncdist_transports.shm.collectives.small import small_exchange_for
from asyncdist_transports.shm.collectives.small_exchange import SmallExchange
from asyncdist_transports.shm.collectives.staging import CollectiveState

log = logging.getLogger("asyncdist")


class ShmNative(Native):
    """The collectives of one group in shared memory.

    Args:
        publish: Shows the members this rank's slot table.
        withdraw: Hides it, and frees it once no member reads it.
    """

    def __init__(self, slots: SlotTable, piece_nbytes: int, publish: Callback, withdraw: Callback) -> None:
        self.slots = slots
        self._piece_nbytes = piece_nbytes
        self._publish, self._withdraw = publish, withdraw
        self.large = Large(slots)

    def open(self) -> None:
        self._publish()

    def close(self) -> None:
        # No later call raises the error of these.
        try:
            self.slots.check_deferred(math.inf)
        except GroupError as error:
            log.error("calls before the end of the group had wrong results: %s", error.summary)
        self._withdraw()

    def publish(self, sequence: int, fingerprint: int) -> Schedule:
        return self.slots.pass_by(sequence, fingerprint)

    def prepare(self, signature: CallSignature) -> PreparedCall:
        if signature.collective is Collective.all_reduce_coalesced:
            return self._all_reduce_coalesced(signature)
        fallback = self.large.continue_all_to_all if signature.collective is Collective.all_to_all else None
        exchange = None if signature.sizes else small_exchange_for(self.slots, signature, fallback)
        staged = self.large.prepare(signature) if exchange is None else exchange.begin
        if signature.collective is not Collective.all_reduce or signature.nbytes < zero_copy.MIN_NBYTES:
            return staged
        return self._zero_copy_or(staged, signature)

    def kept(self, call: PreparedCall, tensors: Sequence[Any]) -> PreparedCall:
        exchange = getattr(call, "__self__", None)
        return exchange.kept(*tensors) if isinstance(exchange, SmallExchange) else call

    def _zero_copy_or(self, staged: PreparedCall, signature: CallSignature) -> PreparedCall:
        """Return the call that reduces registered tensors in place, and stages others."""
        slots, large = self.slots, self.large

        def finish_staged(state: CollectiveState, tensor: torch.Tensor) -> Schedule:
            yield from large.all_reduce_staged(state, Memory(tensor.view(-1)), signature.arithmetic)
            slots.publish(state.number, DONE)

        reduce_in_place = zero_copy.ZeroCopyAllReduce(slots, signature, self._piece_nbytes, finish_staged)

        def start(number: int, tensor: torch.Tensor) -> Schedule | None:
            location = zero_copy.shared_location(slots, tensor)
            return reduce_in_place(number, tensor, location) if location else staged(number, tensor)

        return start

    def _all_reduce_coalesced(self, signature: CallSignature) -> PreparedCall:
        slots, arithmetic = self.slots, signature.arithmetic

        def finish_staged(state: CollectiveState, tensors: Sequence[torch.Tensor]) -> Schedule:
            flat = [Memory(tensor.view(-1)) for tensor in tensors]
            yield from self.large.all_reduce_coalesced_staged(state, flat, arithmetic)

        reduce_in_place = zero_copy.CoalescedZeroCopyAllReduce(
            slots, signature, self._piece_nbytes, finish_staged, signature.sizes
        )

        def start(number: int, tensors: Sequence[torch.Tensor]) -> Schedule:
            yield from slots.enter(number)
            location = zero_copy.post_locations(slots, number, tensors) if zero_copy.are_disjoint(tensors) else 0
            if location:
                yield from reduce_in_place(number, tensors, location)
            else:
                yield from finish_staged(CollectiveState(slots, number, signature.fingerprint), tensors)

        return start
