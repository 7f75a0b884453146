"""Upper bounds for the speed of decoding: read rates divided by the bytes that one token reads. Pure.

Decoding cannot be faster than its slowest reads, so these bounds hold for every engine on this machine; real speeds are lower.
"""

from dataclasses import dataclass

from vismoe.machine.choices import Choices, fits_page_cache, read_bytes_per_s
from vismoe.machine.profile import Profile, disk_of
from vismoe.planning.plan import AUTO_SHARE

MISS_SHARES = (0.25, 0.5)


@dataclass(frozen=True)
class ModelSize:
    """The sizes that decide how fast one sequence is decoded."""

    name: str
    expert_bytes: int  # of one expert, the largest where they differ
    experts_bytes: int  # of all routed experts
    token_experts_bytes: int  # of the experts that one token uses, in all layers
    dense_bytes: int  # of everything else that one token reads: attention, shared MLPs, routers, the language model head

    @classmethod
    def of(cls, name: str, *, expert_bytes: int, layers: int, experts: int, top_k: int, dense_bytes: int) -> "ModelSize":
        """The size of a model whose MoE layers are all alike."""
        return cls(name, expert_bytes, layers * experts * expert_bytes, layers * top_k * expert_bytes, dense_bytes)


EXAMPLES = (  # in bfloat16, from the published configurations
    ModelSize.of("demo model", expert_bytes=3 * 192 * 64 * 2, layers=8, experts=32, top_k=4, dense_bytes=2_637_312),
    ModelSize.of("Qwen3-30B-A3B", expert_bytes=3 * 2048 * 768 * 2, layers=48, experts=128, top_k=8, dense_bytes=2_459_992_064),
    ModelSize.of("Mixtral-8x7B", expert_bytes=3 * 4096 * 14336 * 2, layers=32, experts=8, top_k=2, dense_bytes=2_948_603_904),
)


def spare_bytes(size: ModelSize, free_bytes: int) -> int:
    """RAM that `memory="auto"` leaves beside the model."""
    return free_bytes - min(int(free_bytes * AUTO_SHARE), size.experts_bytes + size.dense_bytes)


def resident_tokens_per_s(profile: Profile, size: ModelSize, device: str) -> float:
    """Tokens per second with every weight in the memory of the device."""
    link = profile.link(device)
    rate = link.device_read_bytes_per_s if link else profile.dram_bytes_per_s
    return rate / (size.token_experts_bytes + size.dense_bytes)


def miss_bytes_per_s(profile: Profile, size: ModelSize, choices: Choices, free_bytes: int, path: str) -> float | None:
    """Bytes per second of missing experts that arrive in RAM; None if the disk of `path` was not measured."""
    cached = fits_page_cache(size.experts_bytes, spare_bytes(size, free_bytes))
    return read_bytes_per_s(disk_of(profile, path), size.expert_bytes, choices.direct_reads, cached)


def tokens_per_s(profile: Profile, size: ModelSize, device: str, miss_share: float, miss_bytes_per_s: float) -> float:
    """Tokens per second if this share of the demanded experts is missing and their copies overlap all other work."""
    arriving = miss_bytes_per_s / (miss_share * size.token_experts_bytes)
    return min(resident_tokens_per_s(profile, size, device), arriving)
