"""Checkpoints of a few small experts, made without transformers, and the stores that are packed from them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from vismoe.store.checkpoint import CheckpointStore, TensorPart
from vismoe.store.index import Contents
from vismoe.store.packed import PackedStore, contents_of
from vismoe.store.safetensors_header import read_header
from vismoe.types import ExpertId, ExpertInventory, Format, MoELayer, RecordLayout

Shapes = dict[str, tuple[int, ...]]
GATED: Shapes = {"gate_up_proj": (128, 64), "down_proj": (64, 64)}
BIASED: Shapes = {"up_proj": (40, 72), "up_proj_bias": (72,), "down_proj": (72, 40), "down_proj_bias": (40,)}


@dataclass(frozen=True)
class Geometry:
    """Sections of an expert, their type, and whether matrices are [in, out]."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False

    @property
    def layout(self) -> RecordLayout:
        return RecordLayout.of(dict(self.shapes), dict.fromkeys(dict(self.shapes), self.dtype))

    @property
    def transposed_sections(self) -> frozenset[str]:
        return frozenset(name for name, shape in self.shapes if len(shape) == 2) if self.transposed else frozenset()


PLAIN = Geometry(tuple(GATED.items()))
TURNED = Geometry(tuple(BIASED.items()), transposed=True)


@dataclass(frozen=True)
class Small:
    """A checkpoint on disk and what its experts are."""

    source: CheckpointStore
    transposed: tuple[frozenset[str], ...]
    weights: dict[ExpertId, dict[str, torch.Tensor]]

    def contents(self, format: Format) -> Contents:
        return contents_of(self.source, format, self.transposed)

    def open(self, folder: Path, format: Format) -> PackedStore:
        return PackedStore.open(folder, self.source, format, self.transposed)


def small(
    folder: Path, geometries: tuple[Geometry, ...] = (PLAIN, TURNED), layers: tuple[int, ...] = (3, 5, 2), seed: int = 0
) -> Small:
    """Layer i has `layers[i]` experts of geometry i, round and round."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        ExpertId(layer, expert): {
            name: torch.randn(shape, generator=generator).mul(0.02).to(geometries[layer % len(geometries)].dtype)
            for name, shape in geometries[layer % len(geometries)].shapes
        }
        for layer, experts in enumerate(layers)
        for expert in range(experts)
    }
    file = folder / "model.safetensors"
    save_file(
        {f"{e.layer}.{e.expert}.{name}": tensor for e, sections in weights.items() for name, tensor in sections.items()}, file
    )
    header = read_header(file)
    inventory = ExpertInventory(
        tuple(MoELayer(i, f"layers.{i}.experts", experts, 1, i % len(geometries)) for i, experts in enumerate(layers)),
        tuple(geometry.layout for geometry in geometries),
    )

    def locator(layer: int, expert: int) -> tuple[tuple[TensorPart, ...], ...]:
        entries = [header.tensors[f"{layer}.{expert}.{section.name}"] for section in inventory.layout(layer).sections]
        return tuple((TensorPart(0, entry.offset_bytes, entry.shape, entry.dtype),) for entry in entries)

    locators = [[locator(layer.index, expert) for expert in range(layer.num_experts)] for layer in inventory.layers]
    transposed = tuple(geometry.transposed_sections for geometry in geometries)
    return Small(CheckpointStore([header], inventory, locators, b"{}"), transposed, weights)


def slab_for(store: PackedStore, layer: int) -> torch.Tensor:
    """Memory as a pool gives it: it begins on a block."""
    nbytes = store.inventory.layout(layer).record_bytes
    memory = torch.full((nbytes + 4096,), 0xA5, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    return memory[start : start + nbytes]


def files_in(folder: Path) -> dict[str, bytes]:
    """What a finished pack left, but for its lock."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "pack.lock"}
