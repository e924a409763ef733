"""The words with which torch's gloo reports timeouts, lost peers and missing ranks.

Programs and tests match these words. The methods of torch's classes add them to the messages of asyncdist's errors, which
keep their own text. `process_group` and `torch_work` use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.errors import GroupError, MismatchError, OperationTimeoutError, PeerLostError


def add_words(error: BaseException | None) -> None:
    """Add the words of a time-out or of a lost peer to the error of an operation. Idempotent: several callers see one."""
    if isinstance(error, OperationTimeoutError):
        direction = "send" if error.op == "send" else "recv"
        _add(error, f"Timed out waiting {_milliseconds(error.timeout)}ms for {direction} operation to complete")
    elif isinstance(error, PeerLostError):
        _add(error, "Connection closed by peer")


def add_monitored_barrier(error: GroupError, ranks: Sequence[int], rank: int, wait_all_ranks: bool) -> None:
    """Add the words of a monitored barrier that failed on this rank; a MismatchError stays as it is.

    Args:
        ranks: Global ranks of the group, of which ``rank`` is the place of this process.
        wait_all_ranks: Name every missing rank, instead of the first one in the order of ranks.
    """
    if isinstance(error, MismatchError):
        return
    words = "" if list(ranks) == list(range(len(ranks))) else "with the group's own rank numbers, "
    if rank != 0:
        words += (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            "rank 0. Please check rank 0 logs for faulty rank."
        )
    elif isinstance(error, OperationTimeoutError) and error.timeout == 0 and not wait_all_ranks:
        words = "Rank 0 timed out in monitoredBarrier after 0 ms. No ranks successfully processed in monitoredBarrier."
    elif isinstance(error, OperationTimeoutError):
        missing = sorted(ranks.index(each) for each in error.awaited)
        named = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
        words += f"[Rank 0]: {named} failed to pass monitoredBarrier in {_milliseconds(error.timeout)} ms"
    elif isinstance(error, PeerLostError):
        named = f"{'Ranks' if wait_all_ranks else 'Rank'} {ranks.index(error.peer)}"
        words += f"[Rank 0]: {named} failed to pass monitoredBarrier"
    else:
        return
    _add(error, words)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _add(error: GroupError, words: str) -> None:
    if words not in error.reason:
        error.reason += f"; in gloo's words: {words}"
