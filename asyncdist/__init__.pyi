"""Where each public name of `asyncdist` lives, for type checkers, and for the package itself, which reads this file."""

from asyncdist.base.ops import ReduceOp as ReduceOp
from asyncdist.base.ops import premul_sum as premul_sum
from asyncdist.config import Config as Config
from asyncdist.ddp import DistributedDataParallel as DistributedDataParallel
from asyncdist.ddp.low_communication.diloco import DiLoCo as DiLoCo
from asyncdist.ddp.low_communication.diloco import LocalSGD as LocalSGD
from asyncdist.ddp.low_communication.outer_training import CommunicationSavings as CommunicationSavings
from asyncdist.ddp.sampler import DistributedSampler as DistributedSampler
from asyncdist.ddp.sharded_optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from asyncdist.elastic.session import JobSession as JobSession
from asyncdist.elastic.session import join as join
from asyncdist.groups.aio import all_gather_coalesced_init as all_gather_coalesced_init
from asyncdist.groups.aio import all_gather_init as all_gather_init
from asyncdist.groups.aio import all_gather_single_init as all_gather_single_init
from asyncdist.groups.aio import all_reduce_coalesced_init as all_reduce_coalesced_init
from asyncdist.groups.aio import all_reduce_init as all_reduce_init
from asyncdist.groups.aio import all_to_all_init as all_to_all_init
from asyncdist.groups.aio import all_to_all_single_init as all_to_all_single_init
from asyncdist.groups.aio import api
from asyncdist.groups.aio import barrier_init as barrier_init
from asyncdist.groups.aio import broadcast_init as broadcast_init
from asyncdist.groups.aio import destroy_process_group as destroy_process_group
from asyncdist.groups.aio import gather_init as gather_init
from asyncdist.groups.aio import gather_single_init as gather_single_init
from asyncdist.groups.aio import init_process_group as init_process_group
from asyncdist.groups.aio import process_group as process_group
from asyncdist.groups.aio import reduce_init as reduce_init
from asyncdist.groups.aio import reduce_scatter_init as reduce_scatter_init
from asyncdist.groups.aio import reduce_scatter_single_init as reduce_scatter_single_init
from asyncdist.groups.aio import scatter_init as scatter_init
from asyncdist.groups.collectives_api import P2POp as P2POp
from asyncdist.groups.default_world import GroupMember as GroupMember
from asyncdist.groups.default_world import get_backend as get_backend
from asyncdist.groups.default_world import get_global_rank as get_global_rank
from asyncdist.groups.default_world import get_group_rank as get_group_rank
from asyncdist.groups.default_world import get_node_local_rank as get_node_local_rank
from asyncdist.groups.default_world import get_process_group_ranks as get_process_group_ranks
from asyncdist.groups.default_world import get_rank as get_rank
from asyncdist.groups.default_world import get_world_size as get_world_size
from asyncdist.groups.default_world import group as group
from asyncdist.groups.default_world import is_available as is_available
from asyncdist.groups.default_world import is_backend_available as is_backend_available
from asyncdist.groups.default_world import is_gloo_available as is_gloo_available
from asyncdist.groups.default_world import is_initialized as is_initialized
from asyncdist.groups.default_world import is_mpi_available as is_mpi_available
from asyncdist.groups.default_world import is_nccl_available as is_nccl_available
from asyncdist.groups.default_world import is_torchelastic_launched as is_torchelastic_launched
from asyncdist.groups.default_world import new_group as new_group
from asyncdist.groups.default_world import new_subgroups as new_subgroups
from asyncdist.groups.default_world import new_subgroups_by_enumeration as new_subgroups_by_enumeration
from asyncdist.groups.default_world import revoke as revoke
from asyncdist.groups.default_world import set_timeout as set_timeout
from asyncdist.groups.default_world import split_group as split_group
from asyncdist.groups.default_world import watch_members as watch_members
from asyncdist.groups.group import Group as Group
from asyncdist.groups.members.member_watch import MemberChange as MemberChange
from asyncdist.groups.members.regrouping import Agreed as Agreed
from asyncdist.groups.members.step import GroupStep as GroupStep
from asyncdist.groups.members.training_state import State as State
from asyncdist.groups.persistent import PersistentCollective as PersistentCollective
from asyncdist.groups.persistent import start_all as start_all
from asyncdist.groups.subgroups import NonMember as NonMember
from asyncdist.groups.windows import Window as Window
from asyncdist.kernel.engine.work import Work as Work
from asyncdist.kernel.memory.registered import empty as empty
from asyncdist.kernel.tracing.hooks import OperationRecord as OperationRecord
from asyncdist.kernel.tracing.hooks import register_hook as register_hook
from asyncdist.kernel.tracing.metrics import GroupMetrics as GroupMetrics
from asyncdist.kernel.tracing.metrics import serve_metrics as serve_metrics
from asyncdist.kernel.tracing.otel import trace_operations as trace_operations
from asyncdist.store import FileStore as FileStore
from asyncdist.store import HashStore as HashStore
from asyncdist.store import PrefixStore as PrefixStore
from asyncdist.store import TCPStore as TCPStore

ProcessGroup = Group
__version__: str

agree = api.agree
all_gather = api.all_gather
all_gather_coalesced = api.all_gather_coalesced
all_gather_into_tensor = api.all_gather_single
all_gather_object = api.all_gather_object
all_gather_single = api.all_gather_single
all_reduce = api.all_reduce
all_reduce_coalesced = api.all_reduce_coalesced
all_to_all = api.all_to_all
all_to_all_single = api.all_to_all_single
barrier = api.barrier
batch_isend_irecv = api.batch_isend_irecv
broadcast = api.broadcast
broadcast_object_list = api.broadcast_object_list
gather = api.gather
gather_into_tensor = api.gather_single
gather_object = api.gather_object
gather_single = api.gather_single
irecv = api.irecv
isend = api.isend
monitored_barrier = api.monitored_barrier
recv = api.recv
recv_object_list = api.recv_object_list
reduce = api.reduce
reduce_scatter = api.reduce_scatter
reduce_scatter_single = api.reduce_scatter_single
reduce_scatter_tensor = api.reduce_scatter_single
regroup = api.regroup
scatter = api.scatter
scatter_object_list = api.scatter_object_list
send = api.send
send_object_list = api.send_object_list
