"""The named shares of memory that a plan adds up: each part and its bytes at a context. Pure."""

from dataclasses import dataclass

from vismoe.config import format_bytes
from vismoe.pair import Format, FormatPair
from vismoe.planning.apportion import Division, experts_of, prefix_bytes
from vismoe.planning.needs import Footprint, mask_bytes
from vismoe.types import ExpertInventory, RecordLayout

DECODE_ROWS = 8  # sequences of a batch that a caller of the model itself can decode, whatever the settings
COPY_STREAMS = 2  # to a GPU: of what was demanded, and of what was not
HEAP_BYTES = 8 * 2**20
RUNTIME_BYTES = {
    "cpu": 160 * 2**20,  # measured: 97 for transformers' model code, 27 for loading it, 34 for the first generate()
    "cuda": 256 * 2**20,  # not measured yet: loaded kernels, cuBLAS workspace; the context is gone from free memory already
}
RUNTIME_NOTES = {"cpu": "model code, processor, threads", "cuda": "kernels, workspace (an estimate); the context is beside it"}


@dataclass(frozen=True)
class PlanPart:
    """One named share of memory. `inside` names the part that already counts these bytes (a detail, not a summand)."""

    name: str
    bytes: int
    note: str = ""
    inside: str = ""


def total(parts: tuple[PlanPart, ...] | list[PlanPart]) -> int:
    """Bytes of all summands: parts that are not details of others."""
    return sum(part.bytes for part in parts if not part.inside)


def mask_room(need: Footprint, context: int, most_bytes: int) -> int:
    """Bytes that explicit attention masks may take: `most_bytes`, or one row of the whole context if that is more."""
    return min(most_bytes, mask_bytes(1, context, context, need.dtype))


def fixed_parts(
    need: Footprint, context: int, device: str, most_mask_bytes: int, rows: int, checked_rows: int = 1
) -> list[PlanPart]:
    """Everything on the device except experts and staging, for `context` tokens, masks of `most_mask_bytes`, and decode passes of
    `rows` sequences, or of `checked_rows` tokens of one: a draft that is checked.

    On the CPU, freed tensors go back to the system (malloc.py), and the slack covers holes between small blocks. On a GPU a phase
    cannot use all memory that the previous phase freed, so the two largest phases are counted.
    """
    images = min(need.max_image_tokens, context)
    held = need.image_token_bytes * images
    passed = max(rows, checked_rows)
    combine = need.combine_token_bytes * max(passed, DECODE_ROWS)
    tokens = need.decode(context) + (passed - 1) * need.decode(1)  # the caches of all rows hold the context together
    prefill, encode, decode = need.prompt_bytes(context) + held, need.encode(images), tokens + combine
    largest, second, _ = sorted((prefill, encode, decode), reverse=True)
    masks = mask_room(need, context, most_mask_bytes)
    padding = max(0, prefill + need.padding(context) + masks - largest)
    slack, why = (HEAP_BYTES, "holes between small blocks of the heap") if device == "cpu" else (second, "between the phases")
    copied = max((layer.copy_token_bytes * layer.tokens(context) for layer in need.cache_layers), default=0)
    checked = f", or {checked_rows} of one: a draft and the token before it" if checked_rows > 1 else ""
    details = [
        PlanPart("vision", encode, f"{images} image tokens in one request; attention without an N x N matrix", "activations"),
        PlanPart(
            "prefill", prefill, f"{context} tokens in one forward, with {format_bytes(held)} of image features", "activations"
        ),
        PlanPart("decode", decode, f"one token of each of up to {rows} sequences{checked}", "activations"),
        PlanPart("KV cache's copy while it grows", copied, "within decode", "activations"),
        PlanPart("combine buffer", combine, f"within decode, up to {max(passed, DECODE_ROWS)} rows", "activations"),
    ]
    return [
        *(PlanPart(name, nbytes) for name, nbytes in need.backbone if nbytes),
        PlanPart("KV cache", need.cache_bytes(context, rows), f"{context} tokens over all sequences"),
        PlanPart("activations", largest, "the largest of these phases"),
        *(detail for detail in details if detail.bytes),
        PlanPart("attention masks", padding, f"up to {format_bytes(masks)}: padded batches, long new parts after cached prompts"),
        PlanPart("allocator slack", slack, why),
        PlanPart("logits", need.logits_bytes * passed, f"{passed} rows kept" if passed > 1 else "one row kept"),
        *workspace_part(need.workspace_bytes),
        *decoding_part(need),
        *(_of_a_cpu(need) if device == "cpu" else []),
        PlanPart("runtime", RUNTIME_BYTES[device], RUNTIME_NOTES[device]),
    ]


def part_of(name: str, nbytes: int, note: str) -> list[PlanPart]:
    """The part, unless it is empty."""
    return [PlanPart(name, nbytes, note)] if nbytes else []


def workspace_part(nbytes: int) -> list[PlanPart]:
    """The workspace of the backend that computes experts; torch keeps nothing beyond the activations."""
    return part_of("expert workspace", nbytes, "kept to compute experts")


def _of_a_cpu(need: Footprint) -> list[PlanPart]:
    """Parts in host memory, which are inside the budget only if the CPU is the device."""
    note = f"generated code for the {need.kernel_entries // 2} latest shapes of a product"
    return [
        PlanPart("kernel caches", need.kernel_bytes, note),
        PlanPart("tokenizer", need.tokenizer_bytes),
        *part_of("Triton", need.triton_bytes, "torch imports it where it is installed"),
    ]


def staging_part(need: Footprint, io_threads: int) -> list[PlanPart]:
    """Bounce buffers of the reading threads and of the demanding thread; none if reads go straight into records."""
    note = f"bounce buffers of {io_threads} reading threads and the demanding one"
    return part_of("staging", need.scratch_bytes * (io_threads + 1), note)


def decoding_part(need: Footprint) -> list[PlanPart]:
    """Where encoded records arrive on a GPU, which decodes them into slabs."""
    decoded = need.encoded if need.packed_from != 0 else ()
    largest = max((layout.record_bytes for layout in decoded), default=0)
    ring = need.packing.ring_bytes if need.packing is not None and need.packed_from is not None else 0
    return [
        *part_of("encoded copies", COPY_STREAMS * largest, "one on each copy stream, to be decoded into a slab"),
        *part_of("decoding ring", ring, "experts that are decoded just before they are computed"),
    ]


def image_cache_part(need: Footprint, nbytes: int) -> list[PlanPart]:
    """Encoded images that are cached between requests; none for a text model."""
    return part_of("image cache", nbytes if need.max_image_tokens else 0, "encoded images kept for later requests")


def draft_part(need: Footprint) -> list[PlanPart]:
    """The experts that draft passes compute with."""
    note = "a second copy of all decoder experts; --memory 25% excludes it, --memory 20GiB includes it"
    return part_of(f"draft pool ({need.draft_format})", need.draft_bytes, note)


def request_part(nbytes: int) -> list[PlanPart]:
    """Host memory that a server's requests hold beside the model."""
    return part_of("request memory", nbytes, "bodies, pictures and their decoders, prompts in preparation")


def expert_parts(inventory: ExpertInventory, division: Division, pair: FormatPair | None, emulated: bool) -> list[PlanPart]:
    """Pinned prefix and one pool per geometry and format. With an emulated link the slabs alias the host tier's records."""
    parts = []
    if division.pinned_layers:
        note = f"all experts of the first {division.pinned_layers} MoE layers"
        parts.append(PlanPart("pinned prefix", prefix_bytes(inventory, division.pinned_layers), note))
    dynamic = experts_of(inventory.layers[division.pinned_layers :], len(inventory.layouts))
    alias = ", aliasing the host tier" if emulated else ""
    for geometry, (slabs, layout) in enumerate(zip(division.slabs, inventory.layouts, strict=True)):
        name = "expert pool" if len(division.slabs) == 1 else f"expert pool {geometry}"
        if pair is not None:
            parts += _pair_parts(inventory, division, pair, geometry, name, alias)
            continue
        note = f"{slabs} slabs of {format_bytes(layout.record_bytes)} for {dynamic[geometry]} experts"
        parts.append(PlanPart(name, slabs * layout.record_bytes, note + alias))
    return parts


def _pair_parts(
    inventory: ExpertInventory, division: Division, pair: FormatPair, geometry: int, name: str, alias: str
) -> list[PlanPart]:
    """The pools of one geometry by format; slabs that only copies in flight use are listed as a detail of the better pool."""

    def pool(format: Format, slabs: int, layout: RecordLayout, whose: str) -> PlanPart:
        note = f"{slabs} slabs of {format_bytes(layout.record_bytes)} for {whose}{alias}"
        return PlanPart(f"{name} {format}", slabs * layout.record_bytes, note)

    layout = inventory.layouts[geometry]
    parts = [pool(pair.high, division.slabs[geometry], layout, _who_is_high(inventory, division, pair, geometry))]
    if division.transient and (in_flight := division.transient[geometry]):
        note = f"{in_flight} of these slabs, for copies in flight"
        parts.append(PlanPart("transient buffer", in_flight * layout.record_bytes, note, parts[0].name))
    if pair.low is not None and (slabs := division.low_slabs[geometry]):
        parts.append(pool(pair.low, slabs, inventory.low_layouts[geometry], "the others"))
    return parts


def _who_is_high(inventory: ExpertInventory, division: Division, pair: FormatPair, geometry: int) -> str:
    """Which experts the slabs of the better format hold, in words."""
    if pair.low is None:
        return "critical experts; others are skipped"
    layers = inventory.layers_of(geometry)
    if not division.low_slabs[geometry]:
        return f"all {sum(layer.num_experts for layer in layers)} experts"
    if not division.hot_quota:
        return "critical experts"
    least, *_, most = sorted([division.hot_quota[layer.index] for layer in layers] * 2)
    return f"the hottest {least if least == most else f'{least} to {most}'} experts of each layer"
