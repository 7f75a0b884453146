"""`vismoe pack`: writes a checkpoint's experts to a store that can be read faster than in place, and verifies stores."""

import argparse
import contextlib
import sys
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe import flags
from vismoe.config import Settings, format_bytes
from vismoe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from vismoe.store.checkpoint import CheckpointStore
    from vismoe.store.index import Contents
    from vismoe.types import Format

FORMATS = [name for name in typing.get_args(typing.get_type_hints(Settings)["format"]) if name != "auto"]
LISTED = 20  # most bad records in a message


def pack_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe pack`."""
    flags.add_one_model(parser)
    flags.add(parser, "--model MODEL", "the model, given as a flag")
    flags.add(parser, "--revision REV", "branch, tag or commit of a hub model")
    flags.add(parser, "--gguf FILE", "pack the experts of this GGUF file of the model; a .gguf file may stand for MODEL as well")
    flags.add(
        parser,
        "--formats NAMES",
        "formats, separated by commas: raw and lossless keep every bit; int8, int4 and int2 are smaller; "
        "a policy with --formats 4/2 needs int4,int2 (default: lossless for bfloat16 experts, raw for others, none for "
        "quantised ones)",
        format_names,
    )
    flags.add(
        parser,
        "--backbone FORMAT",
        "also write the linear layers beside the experts (attention, shared experts, head) in int8, which loses bits and is "
        "used with --backbone int8 only",
        linear_format,
    )
    flags.add(
        parser,
        "--out DIR",
        "folder of the store (default: vismoe-store beside the checkpoint, NAME.vismoe-store beside NAME.gguf)",
    )
    flags.add(
        parser, "--verify", "verify every record of a store instead; MODEL is the store's folder, or the model of the store"
    )
    flags.add(parser, "--json", "one JSON object, sizes in bytes")


def format_names(text: str) -> tuple[str, ...]:
    """`int8,int4` -> ("int8", "int4")."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"no such format: {', '.join(unknown)}; choose among {', '.join(FORMATS)}")
    return names


def linear_format(text: str) -> str:
    """`int8`."""
    if text != "int8":
        raise argparse.ArgumentTypeError(f"no such format of linear layers: {text}; choose int8")
    return text


def run_pack(arguments: Namespace) -> int:
    """Packs one format after another, or verifies."""
    try:
        return run_verify(arguments) if arguments.verify else pack_formats(arguments)
    except KeyboardInterrupt:
        kept = "" if arguments.verify else ": what is packed so far is kept, and the same command continues from there"
        print(f"\ninterrupted{kept}", file=sys.stderr, flush=True)
        if arguments.json:
            flags.print_json(arguments, {"error": {"type": "Interrupted", "message": f"Ctrl-C{kept}"}})
        return flags.INTERRUPTED


def pack_formats(arguments: Namespace) -> int:
    """Packs one format after another, with a line about each."""
    with flags.ctrl_c_exits(arguments), flags.quick_imports():
        from vismoe.models.load.gguf import with_gguf
        from vismoe.models.load.preview import experts_in_place
        from vismoe.store.pack import memory_bound_bytes, pack, refuse_small_disk, workers_for
        from vismoe.store.packed import contents_of, store_beside

        if arguments.backbone:
            with_gguf(flags.one_model(arguments), Settings(gguf=arguments.gguf, backbone="int8"))  # refuses them together
        source, transposed = experts_in_place(flags.one_model(arguments), arguments.revision, arguments.gguf, with_mtp=True)
    formats = wanted_formats(source, arguments.formats)
    folder = Path(arguments.out).expanduser() if arguments.out else store_beside(source.paths[0])
    wanted = [contents_of(source, format, transposed) for format in formats]
    refuse_small_disk(source, folder, wanted)
    total_bytes, report = source.inventory.total_bytes, []
    for contents in wanted:
        workers = workers_for(contents)
        bound = memory_bound_bytes(contents, workers)
        print(
            f"{contents.format}: {len(contents.experts):,} experts, {format_bytes(total_bytes)}, into {folder} "
            f"by {workers} thread{'s' * (workers > 1)} in at most {format_bytes(bound)} of memory",
            file=sys.stderr,
        )
        read_bytes = sum(layer.num_experts * contents.raw[layer.geometry].record_bytes for layer in contents.layers)
        with progress(str(contents.format), read_bytes, arguments.json) as on_bytes:
            packed = pack(source, folder, contents, workers=workers, on_bytes=on_bytes)
        share = packed.stored_bytes / total_bytes
        done = "was complete" if packed.resumed_records == packed.records else "packed"
        print(f"{contents.format}: {done}, {format_bytes(packed.stored_bytes)} ({share:.1%} of the experts)")
        report.append({"format": contents.format, **vars(packed), "workers": workers, "memory_bound_bytes": bound})
    linears = pack_backbone(arguments, folder) if arguments.backbone else None
    if arguments.json:
        flags.print_json(arguments, {"folder": str(folder), "experts_bytes": total_bytes, "formats": report, "backbone": linears})
    return 0


def pack_backbone(arguments: Namespace, folder: Path) -> dict[str, Any]:
    """Packs the linear layers beside the experts, with a line about it."""
    from vismoe.models.load.preview import linears_in_place
    from vismoe.store.packed_linears import pack_linears

    source, linears = linears_in_place(flags.one_model(arguments), arguments.revision)
    before_bytes = sum(part.nbytes for part in linears.values())
    with contextlib.closing(source), progress("linears", before_bytes, arguments.json) as on_bytes:
        packed, was_there = pack_linears(source, folder, linears, on_bytes)
    done = "was complete" if was_there else "packed"
    print(
        f"linear layers in int8: {done}, {len(linears)} in {format_bytes(packed.stored_bytes)} "
        f"({packed.stored_bytes / before_bytes:.1%} of the checkpoint's); lossy, used with --backbone int8 only"
    )
    return {"format": "int8", "layers": len(linears), "stored_bytes": packed.stored_bytes, "was_complete": was_there}


def wanted_formats(source: "CheckpointStore", asked: Sequence[str] | None) -> "tuple[Format, ...]":
    """The formats that the user chose; by default the smallest format that keeps every bit."""
    import torch

    from vismoe.formats.encoded import encodings_of
    from vismoe.types import Format

    own = encodings_of(source.inventory)
    if asked and not (own and {Format.RAW, Format.LOSSLESS} & set(map(Format, asked))):
        return tuple(map(Format, asked))
    if own:
        raise ConfigError(
            f"the experts of this checkpoint are in {' and '.join(own)} already and are read as they lie: a copy that keeps "
            "every bit would not be smaller. Fix: --formats int4 or int2, which have fewer bits, for a policy (own/4, own/2)"
        )
    layouts = source.inventory.raw_layouts
    packable = all(any(section.dtype is torch.bfloat16 for section in layout.sections) for layout in layouts)
    return (Format.LOSSLESS if packable else Format.RAW,)


def run_verify(arguments: Namespace) -> int:
    """Raises CheckpointError for a store that is missing, has bad records or belongs to another checkpoint."""
    with flags.ctrl_c_exits(arguments), flags.quick_imports():
        from vismoe.models.load.preview import experts_in_place
        from vismoe.store.packed import contents_of, formats_in
        from vismoe.types import Format

        folder, belongs = store_folder(arguments)
        named = flags.one_model(arguments)
        source, transposed = experts_in_place(named, arguments.revision, arguments.gguf) if belongs else (None, ())
    formats = tuple(map(Format, arguments.formats)) if arguments.formats else formats_in(folder)
    report: list[dict[str, Any]] = []
    bad: list[str] = []
    for format in formats:
        try:
            wanted = contents_of(source, format, transposed) if source else None
            report.append(verify_format(folder, format, wanted, arguments.json))
        except CheckpointError as error:
            bad.append(str(error))
    try:
        linears = verify_linears(folder, source)
    except CheckpointError as error:
        bad.append(str(error))
    if bad:
        raise CheckpointError("\n".join(bad))
    if arguments.json:
        flags.print_json(arguments, {"folder": str(folder), "formats": report, "backbone": linears})
    return 0


def verify_linears(folder: Path, source: "CheckpointStore | None") -> dict[str, Any] | None:
    """A report of the linear layers that were packed, None where there are none. Raises CheckpointError for the first bad one."""
    from vismoe.store.packed_linears import FILE, PackedLinears

    if not (folder / FILE).exists():
        return None
    packed = PackedLinears.open(folder, source)
    parts_of = packed.reader()
    for name in packed.tensors:
        parts_of(name)
    print(f"linear layers in int8: all {len(packed.tensors)} are intact, {format_bytes(packed.stored_bytes)}")
    return {"format": "int8", "layers": len(packed.tensors), "stored_bytes": packed.stored_bytes}


def verify_format(folder: Path, format: "Format", wanted: "Contents | None", quiet: bool) -> dict[str, Any]:
    """A report of the verified format. Raises CheckpointError for bad records, and for a store whose contents are not
    `wanted`."""
    from vismoe.store.index import read_index, remedy
    from vismoe.store.pack import verify
    from vismoe.store.packed import PackedStore, refuse_other

    index = read_index(folder, format)
    if wanted is not None:
        refuse_other(folder, index.contents, wanted)
    store = PackedStore(folder, index)
    with progress(str(format), store.stored_bytes, quiet) as on_bytes:
        bad = verify(store, on_bytes=on_bytes)
    records = len(store.contents.experts)
    if bad:
        listed = "\n".join(f"  {sentence.partition(' Fix:')[0]}" for sentence in bad[:LISTED])
        more = f"\n  and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
        raise CheckpointError(
            f"{len(bad)} of {records:,} {format} records in {folder} are bad:\n{listed}{more}\nFix: {remedy(folder, format)}"
        )
    print(f"{format}: all {records:,} records are intact, {format_bytes(store.stored_bytes)}")
    return {"format": format, "records": records, "stored_bytes": store.stored_bytes}


def store_folder(arguments: Namespace) -> tuple[Path, bool]:
    """(folder of the store, whether it must belong to the model that was named): the folder of any store, or that of a model."""
    from transformers.utils import SAFE_WEIGHTS_NAME

    from vismoe.models.family.checkpoint_files import demo_model
    from vismoe.models.load.preview import checkpoint_files, read_config
    from vismoe.store.gguf_header import GGUF
    from vismoe.store.packed import find_store, formats_in

    named, out = flags.one_model(arguments), arguments.out
    name = str(out or arguments.gguf or named or demo_model())
    folder = file = Path(name).expanduser()
    if folder.is_dir():
        file = folder / SAFE_WEIGHTS_NAME
    elif file.suffix != GGUF:
        read_config(name, revision=arguments.revision)
        files = checkpoint_files(name, revision=arguments.revision)
        file = files[0] if files else file
        folder = file.parent
    if formats_in(folder):
        return folder, bool(out and (named or arguments.gguf))
    found = find_store(file)
    if found is None:
        raise CheckpointError(
            f"{name} has no complete store. Fix: vismoe pack MODEL (--out DIR for a store elsewhere) begins or continues one"
        )
    return found, bool(not out or named or arguments.gguf)


@contextlib.contextmanager
def progress(name: str, total_bytes: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr with rate and time left; it begins with the bytes that are done already."""
    from tqdm import tqdm

    bar: tqdm | None = None

    def show(done_bytes: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total_bytes, initial=done_bytes, desc=name, unit="B", unit_scale=True, disable=quiet or None)
        bar.update(done_bytes - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


PACK = flags.Command(
    "write a model's experts to a store that is read at full disk speed, in all bits or fewer",
    pack_arguments,
    run_pack,
    """\
  vismoe pack Qwen/Qwen3-VL-30B-A3B-Instruct                     keeps every bit in about 0.7 of the bytes; used from then on
  vismoe pack ./my-model --formats lossless,int4 --out /mnt/nvme/my-model
  vismoe pack ./my-model --formats int4,int2                     both formats of vismoe chat ./my-model --policy importance
  vismoe pack MODEL --gguf model-Q8_0.gguf --formats int4        for --policy hotness --formats own/4, or --format int4
  vismoe pack ./my-model --backbone int8                         also attention, shared experts and head, for --backbone int8
  vismoe pack --verify /mnt/nvme/my-model                        check every record against its checksum

memory: five times the largest expert and 16 MiB for each core, plus twice the largest expert and 64 MiB, whatever the size of the
checkpoint; fewer cores are used if that would exceed 2 GiB. After a kill or an interrupt the same command continues.""",
)
