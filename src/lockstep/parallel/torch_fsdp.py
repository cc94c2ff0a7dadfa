"""What torch's users write for sharded training, and ours too: its enums, dataclasses and wrap policies themselves."""

from torch.distributed.fsdp import (  # noqa: F401 - imported from here
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType as OptimStateKeyType
from torch.distributed.fsdp.wrap import (  # noqa: F401
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
