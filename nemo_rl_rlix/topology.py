"""Which GPUs a pipeline trains and infers on, and which dp rank holds which GPU.

GPU ids are logical: ``0 .. num_gpus - 1`` over the cluster, node ``id // gpus_per_node``.
RLix numbers them so, and maps dp rank ``r`` of the inference cluster to
``sorted(device_mapping)[r * k:(r + 1) * k]`` with ``k`` GPUs a shard; a mapping that
RLix would refuse at registration is refused here, with a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_rlix.errors import SettingError

TRAIN_MAPPING = "rlix.train_device_mapping"
INFER_MAPPING = "rlix.infer_device_mapping"
INFER_TP = "policy.generation.vllm_cfg.tensor_parallel_size"
INFER_PP = "policy.generation.vllm_cfg.pipeline_parallel_size"
TRAIN_TP = "policy.megatron_cfg.tensor_model_parallel_size"
TRAIN_PP = "policy.megatron_cfg.pipeline_model_parallel_size"
TRAIN_CP = "policy.megatron_cfg.context_parallel_size"
TRAIN_EP = "policy.megatron_cfg.expert_model_parallel_size"
TRAIN_ETP = "policy.megatron_cfg.expert_tensor_parallel_size"

SHARD_SIZES_IN_A_NODE = (1, 2, 4, 8)
"""Sizes of a shard that RLix accepts besides whole nodes."""


@dataclass(frozen=True)
class Parallelism:
    """How the trainer splits its model, in Megatron's terms.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        cp: Context-parallel size.
        ep: Expert-parallel size. Expert groups are cut out of the ranks that the
            other sizes leave; it does not multiply the world.
        etp: Tensor-parallel size of the experts; ``None`` means ``tp``, as in Megatron.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the dense layers: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.tp if self.etp is None else self.etp


@dataclass(frozen=True)
class InferenceLayout:
    """dp ranks of the inference shards and their GPUs.

    Attributes:
        device_mapping: Logical GPU ids; sorted on construction, as RLix sorts them.
        tp: Tensor-parallel size of a shard.
        gpus_per_node: GPUs of each node of the cluster.
        pp: Pipeline-parallel size of a shard.
    """

    device_mapping: tuple[int, ...]
    tp: int
    gpus_per_node: int
    pp: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_mapping", tuple(sorted(self.device_mapping)))

    @property
    def gpus_per_shard(self) -> int:
        """GPUs of one shard, which is what RLix calls its ``tp_size``."""
        return self.tp * self.pp

    @property
    def num_shards(self) -> int:
        """Number of dp ranks."""
        return len(self.device_mapping) // self.gpus_per_shard

    def shard_gpus(self, dp_rank: int) -> tuple[int, ...]:
        """Logical GPU ids of a shard, ascending.

        Raises:
            IndexError: There is no such dp rank.
        """
        if not 0 <= dp_rank < self.num_shards:
            raise IndexError(f"dp rank {dp_rank} is not one of 0..{self.num_shards - 1}")
        size = self.gpus_per_shard
        return self.device_mapping[dp_rank * size : (dp_rank + 1) * size]

    def shards_on(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """Shards that use at least one of ``gpus``, ascending."""
        wanted = frozenset(gpus)
        return tuple(r for r in range(self.num_shards) if not wanted.isdisjoint(self.shard_gpus(r)))

    def node_of(self, gpu: int) -> int:
        """Index of the node that a logical GPU belongs to."""
        return gpu // self.gpus_per_node


@dataclass(frozen=True)
class Topology:
    """A pipeline's GPUs, validated. Made by :func:`validate_topology`.

    Attributes:
        train_gpus: Logical GPU ids of the trainer, ascending.
        inference: The inference shards.
        parallelism: How the trainer splits its model.
    """

    train_gpus: tuple[int, ...]
    inference: InferenceLayout
    parallelism: Parallelism

    @property
    def overlap_shards(self) -> tuple[int, ...]:
        """Shards (dp ranks) that must sleep while the pipeline trains."""
        return self.inference.shards_on(self.train_gpus)

    @property
    def free_shards(self) -> tuple[int, ...]:
        """Shards (dp ranks) that may generate while the pipeline trains."""
        overlap = frozenset(self.overlap_shards)
        return tuple(r for r in range(self.inference.num_shards) if r not in overlap)


def validate_topology(
    *,
    train_device_mapping: Sequence[int],
    infer_device_mapping: Sequence[int],
    infer_tp: int,
    num_gpus: int,
    gpus_per_node: int,
    infer_pp: int = 1,
    parallelism: Parallelism | None = None,
    allow_shrink_to_zero: bool = False,
) -> Topology:
    """Check a pipeline's device mappings and parallel sizes against a cluster.

    Args:
        train_device_mapping: Logical GPU ids of the trainer, in any order.
        infer_device_mapping: Logical GPU ids of the inference shards, in any order.
        infer_tp: Tensor-parallel size of an inference shard.
        num_gpus: GPUs of the cluster.
        gpus_per_node: GPUs of each node, the same on all.
        infer_pp: Pipeline-parallel size of an inference shard.
        parallelism: How the trainer splits its model; ``None``: data-parallel only.
        allow_shrink_to_zero: Accept that training leaves no shard to generate.

    Raises:
        SettingError: Names the setting that cannot work and what to write instead.
    """
    parallelism = parallelism or Parallelism()
    _check_cluster(num_gpus, gpus_per_node)
    infer = _check_mapping(INFER_MAPPING, infer_device_mapping, num_gpus)
    train = _check_mapping(TRAIN_MAPPING, train_device_mapping, num_gpus)
    _check_positive(INFER_TP, infer_tp)
    _check_positive(INFER_PP, infer_pp)
    layout = InferenceLayout(infer, tp=infer_tp, gpus_per_node=gpus_per_node, pp=infer_pp)
    _check_shards(layout)
    _check_parallelism(train, parallelism)

    outside = sorted(set(train) - set(infer))
    if outside:
        raise SettingError(
            TRAIN_MAPPING,
            list(train),
            f"GPUs {outside} are not inference GPUs; a pipeline trains inside {INFER_MAPPING}",
            f"Add them to {INFER_MAPPING}, or train on GPUs out of {list(infer)}",
        )
    topology = Topology(train_gpus=train, inference=layout, parallelism=parallelism)
    if not topology.free_shards and not allow_shrink_to_zero:
        raise SettingError(
            INFER_MAPPING,
            list(infer),
            f"each of the {layout.num_shards} shards ({layout.gpus_per_shard} GPUs each) uses a"
            f" training GPU of {list(train)}, so generation stands still during every step",
            f"Add {layout.gpus_per_shard} GPUs that do not train, train on fewer, or set"
            " rlix.allow_shrink_to_zero=true",
        )
    return topology


def _check_positive(setting: str, value: int) -> None:
    if not _is_int(value) or value < 1:
        raise SettingError(setting, value, "not a positive integer", "Write 1 or more")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_cluster(num_gpus: int, gpus_per_node: int) -> None:
    _check_positive("cluster.gpus_per_node", gpus_per_node)
    if not _is_int(num_gpus) or num_gpus < 1:
        raise SettingError(
            "cluster.num_gpus",
            num_gpus,
            "the cluster has no GPU",
            "Start Ray on machines with GPUs, or with logical ones (num_gpus=)",
        )
    if num_gpus % gpus_per_node:
        raise SettingError(
            "cluster.gpus_per_node",
            gpus_per_node,
            f"the cluster's {num_gpus} GPUs are not a whole number of such nodes",
            "Give the number of GPUs that every node has; nodes must be alike",
        )


def _check_mapping(setting: str, mapping: Sequence[int], num_gpus: int) -> tuple[int, ...]:
    """The mapping in canonical order, or the reason why it is none."""
    value = list(mapping)
    in_range = f"Use ids from 0 to {num_gpus - 1}"
    if not value:
        raise SettingError(setting, value, "no GPU is given", f"{in_range}, at least one")
    wrong = [gpu for gpu in value if not _is_int(gpu)]
    if wrong:
        raise SettingError(setting, value, f"{wrong} are not integers", in_range)
    negative = sorted({gpu for gpu in value if gpu < 0})
    if negative:
        raise SettingError(setting, value, f"{negative} are negative", in_range)
    repeated = sorted({gpu for gpu in value if value.count(gpu) > 1})
    if repeated:
        raise SettingError(setting, value, f"{repeated} occur twice", "Name each GPU once")
    beyond = sorted(gpu for gpu in value if gpu >= num_gpus)
    if beyond:
        raise SettingError(
            setting, value, f"{beyond} do not exist: the cluster has {num_gpus} GPUs", in_range
        )
    return tuple(sorted(value))


def _check_shards(layout: InferenceLayout) -> None:
    size, per_node, count = layout.gpus_per_shard, layout.gpus_per_node, len(layout.device_mapping)
    # With pipeline stages it is the product that does not fit, but one name must be blamed.
    setting, value = (INFER_TP, layout.tp) if layout.pp == 1 else (INFER_PP, layout.pp)
    shape = f"a shard of {size} GPUs (tensor {layout.tp} x pipeline {layout.pp})"
    if size not in SHARD_SIZES_IN_A_NODE and size % per_node:
        sizes = ", ".join(str(s) for s in SHARD_SIZES_IN_A_NODE if s <= per_node)
        raise SettingError(
            setting,
            value,
            f"{shape} is no size that RLix schedules on nodes of {per_node} GPUs",
            f"Use {sizes} or a multiple of {per_node}",
        )
    if size > per_node and size % per_node:
        raise SettingError(
            setting,
            value,
            f"{shape} spans nodes of {per_node} GPUs without filling them",
            f"Use at most {per_node}, or a multiple of it",
        )
    if count % size:
        raise SettingError(
            INFER_MAPPING,
            list(layout.device_mapping),
            f"{count} GPUs do not divide into shards of {size} ({INFER_TP}={layout.tp},"
            f" {INFER_PP}={layout.pp})",
            f"Give a multiple of {size} GPUs",
        )
    for dp_rank in range(layout.num_shards):
        _check_group(layout, dp_rank)


def _check_group(layout: InferenceLayout, dp_rank: int) -> None:
    group, per_node = layout.shard_gpus(dp_rank), layout.gpus_per_node
    size = len(group)
    if group[-1] - group[0] != size - 1:
        reason = "are not consecutive"
    elif size <= per_node and layout.node_of(group[0]) != layout.node_of(group[-1]):
        reason = f"cross the border between two nodes of {per_node} GPUs"
    elif size > per_node and group[0] % per_node:
        reason = f"are not whole nodes of {per_node} GPUs"
    else:
        return
    fit = (
        f"{size} consecutive ids inside one node"
        if size <= per_node
        else f"{size // per_node} whole nodes in a row"
    )
    raise SettingError(
        INFER_MAPPING,
        list(layout.device_mapping),
        f"the GPUs {list(group)} of shard {dp_rank} {reason}",
        f"Each {size} ids of the sorted mapping must be {fit}",
    )


def _check_parallelism(train: tuple[int, ...], p: Parallelism) -> None:
    for setting, size in ((TRAIN_TP, p.tp), (TRAIN_PP, p.pp), (TRAIN_CP, p.cp), (TRAIN_EP, p.ep)):
        _check_positive(setting, size)
    _check_positive(TRAIN_ETP, p.expert_tp)
    world = len(train)
    if world % p.ranks_per_replica:
        raise SettingError(
            TRAIN_MAPPING,
            list(train),
            f"{world} GPUs do not divide into replicas of {p.ranks_per_replica}"
            f" ({TRAIN_TP}={p.tp}, {TRAIN_PP}={p.pp}, {TRAIN_CP}={p.cp})",
            f"Give a multiple of {p.ranks_per_replica} GPUs, or lower one of the sizes",
        )
    # Megatron lays a second grid over the ranks of a pipeline stage for the experts:
    # tp * cp * dp = etp * ep * (expert data parallel). With etp = tp, ep divides cp * dp.
    stage = world // p.pp
    if stage % p.expert_tp:
        raise SettingError(
            TRAIN_ETP,
            p.expert_tp,
            f"it does not divide the {stage} ranks of a pipeline stage",
            f"Use one of {_divisors(stage)}",
        )
    room = stage // p.expert_tp
    if room % p.ep:
        raise SettingError(
            TRAIN_EP,
            p.ep,
            f"expert groups are cut out of the {stage} ranks of a pipeline stage, {room} with"
            f" {TRAIN_ETP}={p.expert_tp}, which it does not divide",
            f"Use one of {_divisors(room)}",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
