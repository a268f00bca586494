"""A model, the machine that trains it, and how the one is spread over the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeschool.actions import Schedule
from pipeschool.arguments import number, whole_number
from pipeschool.schedules import build

MIB, GIB, GB = 2**20, 2**30, 10**9


@dataclass(frozen=True)
class Transformer:
    """A Transformer of equal layers, with its word vectors at both ends.

    layers, hidden, sequence, vocabulary: numbers of each; 0 for a vocabulary leaves the ends out.
    bytes_per_number: of weights, gradients, activations and messages; 2 for bf16.
    optimizer_bytes: of the optimizer's state, per weight. 12 for Adam in mixed precision: a copy
        of the weight and two moments in 4 bytes each (Rajbhandari et al., ZeRO, SC 2020).
    """

    layers: int
    hidden: int
    sequence: int
    vocabulary: int = 0
    bytes_per_number: float = 2
    optimizer_bytes: float = 12

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "sequence"):
            whole_number(name, getattr(self, name))
        whole_number("vocabulary", self.vocabulary, at_least=0)
        number("bytes_per_number", self.bytes_per_number, positive=True)
        number("optimizer_bytes", self.optimizer_bytes)

    @property
    def layer_parameters(self) -> int:
        """12 hidden^2: four square matrices of attention, and eight of the two linear layers after
        it. Biases and norms are left out."""
        return 12 * self.hidden**2

    @property
    def ends(self) -> int:
        """Parameters of the table of word vectors, which input and output share."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer_parameters + self.ends

    def boundary_bytes(self, microbatch: int = 1) -> float:
        """Bytes of a message between two stages: a vector for each word of each sequence."""
        return microbatch * self.sequence * self.hidden * self.bytes_per_number

    def layer_activation_bytes(self, microbatch: int, tensor: int) -> float:
        """What a layer keeps for its backward, on one of `tensor` devices.

        5 + 12/tensor times the boundary: 17 vectors per word, of which 12 are cut by tensor
        parallelism (Korthikanti et al., MLSys 2023, equation 2). The attention weights, which grow
        with the square of the sequence, count as computed again.
        """
        return self.boundary_bytes(microbatch) * (5 + 12 / tensor)


@dataclass(frozen=True)
class Machine:
    """Equal devices in equal nodes.

    memory: bytes of a device. flops: floating-point operations per second that a device reaches
    in training, about half of what its data sheet promises. inside, between: bytes per second that
    a device can send to another one in its node, and in another node. latency: seconds that each
    message takes in addition.
    """

    devices_per_node: int
    nodes: int
    memory: float
    flops: float
    inside: float
    between: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        whole_number("devices_per_node", self.devices_per_node)
        whole_number("nodes", self.nodes)
        for name in ("memory", "flops", "inside", "between"):
            number(name, getattr(self, name), positive=True)
        number("latency", self.latency)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.devices_per_node * self.nodes

    def is_inside(self, span: int, used: int) -> bool:
        """Whether, of `used` devices, each group of `span` neighbours is within one node."""
        return used <= self.devices_per_node or self.devices_per_node % span == 0

    def bandwidth(self, span: int, used: int) -> float:
        """Bytes per second of the slowest link within such a group."""
        return self.inside if self.is_inside(span, used) else self.between


@dataclass(frozen=True)
class Mix:
    """Pipelines of `pipeline` stages, `data` of them, each stage on `tensor` devices.

    Devices are numbered so that those of one stage come first, then the copies of it, then the
    next stage, as Megatron-LM does: what talks most sits closest.

    m: microbatches that each pipeline takes per step. microbatch: sequences in each.
    schedule: a name, as for `ps.build`. v: chunks per device, where the schedule has a choice.
    recompute: keep a stage's input only, and go forward again before the backward.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    m: int = 1
    microbatch: int = 1
    schedule: str = "one_f_one_b"
    v: int | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "pipeline", "tensor", "m", "microbatch"):
            whole_number(name, getattr(self, name))

    def __str__(self) -> str:
        size = f" of {self.microbatch}" if self.microbatch > 1 else ""
        again = ", recompute" if self.recompute else ""
        return f"{self.data} x {self.pipeline} x {self.tensor}, m={self.m}{size}{again}"

    @property
    def devices(self) -> int:
        """How many it takes."""
        return self.data * self.pipeline * self.tensor

    @property
    def batch(self) -> int:
        """Sequences of one step, all pipelines together."""
        return self.data * self.m * self.microbatch

    @property
    def data_span(self) -> int:
        """Neighbouring devices that hold all copies of a stage."""
        return self.tensor * self.data

    def build(self, batches: int = 1) -> Schedule:
        """The schedule of one pipeline."""
        return build(self.schedule, self.pipeline, self.m, batches, self.v)

    def layout(self) -> Schedule:
        """The schedule of a few microbatches: enough to see which device has which stages."""
        few = min(self.m, 2 * self.pipeline)
        return _layout(self.schedule, self.pipeline, few, self.v)


@lru_cache(maxsize=1024)
def _layout(name: str, p: int, m: int, v: int | None) -> Schedule:
    return build(name, p, m, v=v)


def cut_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as can be, the larger ones first."""
    if stages > layers:
        raise ValueError(f"a model of {layers} layers cannot be cut into {stages} stages")
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def gigabytes(size: float) -> str:
    """``76.2 GB``, and ``2,875 GB``; GB are 10^9 bytes."""
    return f"{size / GB:,.0f} GB" if size >= 100 * GB else f"{size / GB:.3g} GB"


def all_reduce_bytes(size: float, devices: int) -> float:
    """Bytes that each of `devices` sends so that all have the sum of `size` bytes of each.

    2 (n - 1)/n times the size: once round the ring to add up pieces of 1/n, once to hand out the
    sums (Patarasuk and Yuan, 2009).
    """
    return 2 * (devices - 1) / devices * size


def all_reduce_seconds(size: float, devices: int, bandwidth: float, latency: float) -> float:
    """Those bytes over the slowest link, and the latency of 2 (n - 1) messages in turn."""
    return all_reduce_bytes(size, devices) / bandwidth + 2 * (devices - 1) * latency


def most(schedule: Schedule, per_stage: Sequence[float]) -> float:
    """The largest sum over the stages of a worker."""
    return max(sum(per_stage[s] for s in schedule.stages_of(w)) for w in range(schedule.p))
