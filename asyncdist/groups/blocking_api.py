"""The return types of the blocking API: None, or a `Work` with ``async_op=True``.

`CollectivesApi` defines and documents the functions. Its annotations are those of the awaited API. `BlockingApi` declares
the same arguments with the results of the blocking API, for type checkers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from asyncdist.groups.collectives_api import CollectivesApi

if TYPE_CHECKING:
    from asyncdist.base.deadline import Timeout
    from asyncdist.base.ops import ReduceOp
    from asyncdist.groups.default_world import AnyGroup
    from asyncdist.groups.group import Group
    from asyncdist.groups.members.regrouping import Agreed
    from asyncdist.kernel.engine.work import Work
    from asyncdist.kernel.memory.tensor_types import ReductionLike, TensorLike, TensorListsT, TensorsT, TensorT


class BlockingApi(CollectivesApi):
    """A `CollectivesApi` whose calls block unless ``async_op=True``."""

    if TYPE_CHECKING:

        @overload
        def all_reduce(
            self,
            tensor: TensorLike,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_reduce(
            self, tensor: TensorT, op: ReductionLike = ReduceOp.SUM, group: AnyGroup = None, *, async_op: Literal[True]
        ) -> Work[TensorT]: ...
        @overload
        def all_reduce(
            self, tensor: TensorT, op: ReductionLike = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
        ) -> Work[TensorT] | None: ...

        @overload
        def all_reduce_coalesced(
            self,
            tensors: Sequence[TensorLike],
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_reduce_coalesced(
            self,
            tensors: TensorsT,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
        ) -> Work[TensorsT]: ...
        @overload
        def all_reduce_coalesced(
            self, tensors: TensorsT, op: ReductionLike = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
        ) -> Work[TensorsT] | None: ...

        @overload
        def reduce(
            self,
            tensor: TensorLike,
            dst: int | None = None,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
            group_dst: int | None = None,
        ) -> None: ...
        @overload
        def reduce(
            self,
            tensor: TensorT,
            dst: int | None = None,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
            group_dst: int | None = None,
        ) -> Work[TensorT]: ...
        @overload
        def reduce(
            self,
            tensor: TensorT,
            dst: int | None = None,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: bool = False,
            group_dst: int | None = None,
        ) -> Work[TensorT] | None: ...

        @overload
        def broadcast(
            self,
            tensor: TensorLike,
            src: int | None = None,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
            group_src: int | None = None,
        ) -> None: ...
        @overload
        def broadcast(
            self,
            tensor: TensorT,
            src: int | None = None,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
            group_src: int | None = None,
        ) -> Work[TensorT]: ...
        @overload
        def broadcast(
            self,
            tensor: TensorT,
            src: int | None = None,
            group: AnyGroup = None,
            async_op: bool = False,
            group_src: int | None = None,
        ) -> Work[TensorT] | None: ...

        @overload
        def all_gather(
            self,
            tensor_list: Sequence[TensorLike],
            tensor: TensorLike,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_gather(
            self, tensor_list: TensorsT, tensor: TensorLike, group: AnyGroup = None, *, async_op: Literal[True]
        ) -> Work[TensorsT]: ...
        @overload
        def all_gather(
            self, tensor_list: TensorsT, tensor: TensorLike, group: AnyGroup = None, async_op: bool = False
        ) -> Work[TensorsT] | None: ...

        @overload
        def all_gather_single(
            self,
            output_tensor: TensorLike,
            input_tensor: TensorLike,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_gather_single(
            self, output_tensor: TensorT, input_tensor: TensorLike, group: AnyGroup = None, *, async_op: Literal[True]
        ) -> Work[TensorT]: ...
        @overload
        def all_gather_single(
            self, output_tensor: TensorT, input_tensor: TensorLike, group: AnyGroup = None, async_op: bool = False
        ) -> Work[TensorT] | None: ...

        @overload
        def all_gather_coalesced(
            self,
            output_tensor_lists: Sequence[Sequence[TensorLike]],
            input_tensor_list: Sequence[TensorLike],
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_gather_coalesced(
            self,
            output_tensor_lists: TensorListsT,
            input_tensor_list: Sequence[TensorLike],
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
        ) -> Work[TensorListsT]: ...
        @overload
        def all_gather_coalesced(
            self,
            output_tensor_lists: TensorListsT,
            input_tensor_list: Sequence[TensorLike],
            group: AnyGroup = None,
            async_op: bool = False,
        ) -> Work[TensorListsT] | None: ...

        @overload
        def gather(
            self,
            tensor: TensorLike,
            gather_list: Sequence[TensorLike] | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
            group_dst: int | None = None,
        ) -> None: ...
        @overload
        def gather(
            self,
            tensor: TensorLike,
            gather_list: TensorsT | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
            group_dst: int | None = None,
        ) -> Work[TensorsT | None]: ...
        @overload
        def gather(
            self,
            tensor: TensorLike,
            gather_list: TensorsT | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            async_op: bool = False,
            group_dst: int | None = None,
        ) -> Work[TensorsT | None] | None: ...

        @overload
        def gather_single(
            self,
            tensor: TensorLike,
            gather_tensor: TensorLike | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
            group_dst: int | None = None,
        ) -> None: ...
        @overload
        def gather_single(
            self,
            tensor: TensorLike,
            gather_tensor: TensorT | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
            group_dst: int | None = None,
        ) -> Work[TensorT | None]: ...
        @overload
        def gather_single(
            self,
            tensor: TensorLike,
            gather_tensor: TensorT | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            async_op: bool = False,
            group_dst: int | None = None,
        ) -> Work[TensorT | None] | None: ...

        @overload
        def scatter(
            self,
            tensor: TensorLike,
            scatter_list: Sequence[TensorLike] | None = None,
            src: int | None = None,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
            group_src: int | None = None,
        ) -> None: ...
        @overload
        def scatter(
            self,
            tensor: TensorT,
            scatter_list: Sequence[TensorLike] | None = None,
            src: int | None = None,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
            group_src: int | None = None,
        ) -> Work[TensorT]: ...
        @overload
        def scatter(
            self,
            tensor: TensorT,
            scatter_list: Sequence[TensorLike] | None = None,
            src: int | None = None,
            group: AnyGroup = None,
            async_op: bool = False,
            group_src: int | None = None,
        ) -> Work[TensorT] | None: ...

        @overload
        def reduce_scatter(
            self,
            output: TensorLike,
            input_list: Sequence[TensorLike],
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def reduce_scatter(
            self,
            output: TensorT,
            input_list: Sequence[TensorLike],
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
        ) -> Work[TensorT]: ...
        @overload
        def reduce_scatter(
            self,
            output: TensorT,
            input_list: Sequence[TensorLike],
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: bool = False,
        ) -> Work[TensorT] | None: ...

        @overload
        def reduce_scatter_single(
            self,
            output: TensorLike,
            input: TensorLike,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def reduce_scatter_single(
            self,
            output: TensorT,
            input: TensorLike,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
        ) -> Work[TensorT]: ...
        @overload
        def reduce_scatter_single(
            self,
            output: TensorT,
            input: TensorLike,
            op: ReductionLike = ReduceOp.SUM,
            group: AnyGroup = None,
            async_op: bool = False,
        ) -> Work[TensorT] | None: ...

        @overload
        def all_to_all(
            self,
            output_tensor_list: Sequence[TensorLike],
            input_tensor_list: Sequence[TensorLike],
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_to_all(
            self,
            output_tensor_list: TensorsT,
            input_tensor_list: Sequence[TensorLike],
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
        ) -> Work[TensorsT]: ...
        @overload
        def all_to_all(
            self,
            output_tensor_list: TensorsT,
            input_tensor_list: Sequence[TensorLike],
            group: AnyGroup = None,
            async_op: bool = False,
        ) -> Work[TensorsT] | None: ...

        @overload
        def all_to_all_single(
            self,
            output: TensorLike,
            input: TensorLike,
            output_split_sizes: Sequence[int] | None = None,
            input_split_sizes: Sequence[int] | None = None,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
        ) -> None: ...
        @overload
        def all_to_all_single(
            self,
            output: TensorT,
            input: TensorLike,
            output_split_sizes: Sequence[int] | None = None,
            input_split_sizes: Sequence[int] | None = None,
            group: AnyGroup = None,
            *,
            async_op: Literal[True],
        ) -> Work[TensorT]: ...
        @overload
        def all_to_all_single(
            self,
            output: TensorT,
            input: TensorLike,
            output_split_sizes: Sequence[int] | None = None,
            input_split_sizes: Sequence[int] | None = None,
            group: AnyGroup = None,
            async_op: bool = False,
        ) -> Work[TensorT] | None: ...

        @overload
        def barrier(
            self,
            group: AnyGroup = None,
            async_op: Literal[False] = False,
            device_ids: object = None,
            timeout: Timeout = None,
        ) -> None: ...
        @overload
        def barrier(
            self, group: AnyGroup = None, *, async_op: Literal[True], device_ids: object = None, timeout: Timeout = None
        ) -> Work[None]: ...
        @overload
        def barrier(
            self, group: AnyGroup = None, async_op: bool = False, device_ids: object = None, timeout: Timeout = None
        ) -> Work[None] | None: ...

        def monitored_barrier(
            self, group: AnyGroup = None, timeout: Timeout = None, wait_all_ranks: bool = False
        ) -> None: ...

        def all_gather_object(
            self, object_list: list[Any], obj: Any, group: AnyGroup = None, weights_only: bool = False
        ) -> None: ...

        def gather_object(
            self,
            obj: Any,
            object_gather_list: list[Any] | None = None,
            dst: int | None = None,
            group: AnyGroup = None,
            group_dst: int | None = None,
            weights_only: bool = False,
        ) -> None: ...

        def scatter_object_list(
            self,
            scatter_object_output_list: list[Any],
            scatter_object_input_list: Sequence[Any] | None = None,
            src: int | None = None,
            group: AnyGroup = None,
            group_src: int | None = None,
            weights_only: bool = False,
        ) -> None: ...

        def broadcast_object_list(
            self,
            object_list: list[Any],
            src: int | None = None,
            group: AnyGroup = None,
            device: object = None,
            group_src: int | None = None,
            weights_only: bool = False,
        ) -> None: ...

        def agree(self, flag: bool | int = True, group: AnyGroup = None, timeout: Timeout = None) -> Agreed: ...

        def regroup(self, group: AnyGroup = None, min_size: int = 1, timeout: Timeout = None) -> Group: ...

        def send(
            self,
            tensor: TensorLike,
            dst: int | None = None,
            group: AnyGroup = None,
            tag: int = 0,
            group_dst: int | None = None,
        ) -> None: ...

        def recv(
            self,
            tensor: TensorLike,
            src: int | None = None,
            group: AnyGroup = None,
            tag: int = 0,
            group_src: int | None = None,
        ) -> int: ...

        def send_object_list(
            self,
            object_list: Sequence[Any],
            dst: int | None = None,
            group: AnyGroup = None,
            device: object = None,
            group_dst: int | None = None,
            use_batch: bool = False,
            weights_only: bool = False,
        ) -> None: ...

        def recv_object_list(
            self,
            object_list: list[Any],
            src: int | None = None,
            group: AnyGroup = None,
            device: object = None,
            group_src: int | None = None,
            use_batch: bool = False,
            weights_only: bool = False,
        ) -> int: ...
