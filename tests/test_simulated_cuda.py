"""The order of copies and kernels on a GPU, on simulated streams: the real pager, mover and host tier, and what each of their
orders is for: without it a kernel reads another expert's bytes, every time."""

import contextlib
import ctypes
import functools
import itertools
import queue
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simulated_cuda import Event, SimulatedCuda, SimulatedPool, SimulatedTensor, Stream

from vismoe.errors import TransferError
from vismoe.lookahead.background import BackgroundLookahead
from vismoe.lookahead.lookahead import Seen
from vismoe.paging import transfer
from vismoe.paging.lent import Group
from vismoe.paging.pager import Pager
from vismoe.paging.tickets import Ticket
from vismoe.paging.transfer import Decoding, DeviceMover
from vismoe.pools.cuda_copies import copier
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.pools.readback import on_host
from vismoe.pools.slabs import Slabs
from vismoe.types import ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout

LAYERS, EXPERTS, TOP_K, SLABS, RECORDS = 3, 10, 3, 5, 3


class FilledStore:
    """All numbers of a record say which expert it is."""

    scratch_bytes = 0
    fingerprint = "numbers"
    layout = RecordLayout.of({"w": (16,)}, {"w": torch.int64})
    inventory = ExpertInventory(tuple(MoELayer(i, f"layers.{i}", EXPERTS, TOP_K, 0) for i in range(LAYERS)), (layout,))

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        record.view(torch.int64).fill_(number(*expert))
        return record.numel()


class EncodedStore(FilledStore):
    """Its records are the size that the lossless format has in the second word, and the numbers negated."""

    encoded = RecordLayout((), 256)  # more than any record

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        words = record.view(torch.int64)
        words[2:18], words[18:] = -number(*expert), torch.iinfo(torch.int64).max
        words[1] = 18 * 8
        return 18 * 8


class SimulatedDecoder:
    def __init__(self, cuda: SimulatedCuda):
        self._cuda = cuda

    def __call__(self, encoded, record) -> None:
        assert encoded.bytes.numel() == 18 * 8, "only what the record has crosses the link"
        source, target = encoded.bytes.view(torch.int64)[2:], record.bytes.view(torch.int64)
        for half in (slice(0, 8), slice(8, 16)):
            self.queue(lambda half=half: target[half].copy_(-source[half]))

    def queue(self, operation) -> None:
        self._cuda.launch(operation)


def decoding(cuda: SimulatedCuda) -> Decoding:
    return Decoding(SimulatedPool(cuda, EncodedStore.encoded, 2), [SimulatedDecoder(cuda)])


def number(layer: int, expert: int) -> int:
    return 100 * layer + expert


class InOneThread(DeviceMover):
    """The model's thread copies, so that everything happens in an order that the seed decides."""

    by_demander = True


def wrong_reads(
    cuda: SimulatedCuda,
    patch,
    mover=InOneThread,
    threads=0,
    readback=False,
    steps=10,
    encoded=False,
    queued=False,
    at_once=False,
    by_driver=False,
) -> list[tuple[int, set[int]]]:
    """(the expert that a kernel was launched for, the experts whose numbers it read) for every kernel that read another one.
    `queued`: host memory holds every expert from the start, so that demanded copies are queued and no thread waits for them.
    `at_once`: layers are served in one step where that is possible. `by_driver`: copies are queued by the driver's function."""
    cuda.install(patch)
    store, rng, wrong = EncodedStore() if encoded else FilledStore(), random.Random(1), []
    served_at_once = 0
    few = functools.partial(HostTier, store, (RECORDS,), page_locked=False)
    tier = filled(store) if queued else few(layouts=(store.encoded,) if encoded else None)
    pager = Pager(
        store.inventory,
        (SimulatedPool(cuda, store.layout, SLABS),),
        mover(tier, device=torch.device("cpu"), decoding=decoding(cuda) if encoded else None),
        threads=threads,
    )

    def read_others():
        """As other workers would: enough that only a leased record stays."""
        for expert in rng.sample(range(EXPERTS), RECORDS):
            with tier.lease(ExpertId(rng.randrange(LAYERS), expert)):
                pass

    if by_driver:
        queue_by_driver(pager.transfer._mover, cuda, patch)
    cuda.meanwhile = read_others if not threads else lambda: None

    def kernel(weights: torch.Tensor, wanted: int) -> None:
        if (read := set(weights.tolist())) != {wanted}:
            wrong.append((wanted, read))

    def launch(layer: int, group: Group) -> None:
        for lent in group:
            reading = functools.partial(kernel, lent.weights["w"], number(layer, lent.expert))
            cuda.launch(reading), cuda.launch(reading)  # a long kernel reads early and late

    def launched(layer: int):
        return SimpleNamespace(begin=functools.partial(launch, layer), begin_on_host=None, end=lambda: True, abandon=None)

    try:
        for _ in range(steps):
            pager.begin_step(Phase.DECODE)
            for layer in range(LAYERS):
                if readback:
                    cuda.compute.synchronize()
                chosen = sorted(rng.sample(range(EXPERTS), TOP_K))
                if at_once and pager.at_once(layer, np.array(chosen[::-1]), launched(layer), 0.0):
                    served_at_once += 1
                    continue
                with pager.demand(layer, chosen) as demand:
                    if layer + 1 < LAYERS and rng.random() < (0.1 if at_once else 0.7):
                        guess = np.zeros((1, EXPERTS), np.float32)
                        guess[0, rng.sample(range(EXPERTS), TOP_K)] = 1.5
                        pager.look_ahead(layer, guess)
                    for group in demand.groups(in_order=False):
                        launch(layer, group)
        cuda.compute.synchronize()
        pager.check_integrity()
        counts = pager.metrics.snapshot()
        assert counts.total("evictions") > 10 and (served_at_once > LAYERS * steps // 3) == at_once
        assert counts.total("bytes_copied") % (18 * 8 if encoded else store.layout.record_bytes) == 0
    finally:
        pager.close()
    return wrong


def queue_by_driver(mover: DeviceMover, cuda: SimulatedCuda, patch) -> None:
    """As on a GPU, where copies name addresses; in halves, on the stream of what was demanded."""

    def copy_half(there: int, here: int, nbytes: int) -> None:
        ctypes.memmove(there, here, nbytes)

    def put(there: np.ndarray, here: np.ndarray, nbytes: int) -> None:
        for to, source in zip(there.tolist(), here.tolist()):
            for start, size in ((0, nbytes // 2), (nbytes // 2, nbytes - nbytes // 2)):
                mover._demanded.put(functools.partial(copy_half, to + start, source + start, size))

    mover.__dict__["_put"] = put
    patch.setattr(torch.cuda, "current_device", lambda: mover._device.index)


@pytest.mark.budget(3)
@pytest.mark.parametrize("encoded", [False, True], ids=["as in slabs", "encoded"])
@pytest.mark.parametrize("readback", [False, True], ids=["no readback", "a readback per layer"])
@pytest.mark.parametrize(
    "queued, at_once", [(False, False), (True, False), (True, True)], ids=["waited for", "queued", "at once"]
)
def test_no_kernel_reads_a_wrong_byte_whatever_the_device_runs_first(queued, at_once, readback, encoded, monkeypatch):
    how = {"readback": readback, "encoded": encoded, "queued": queued, "at_once": at_once, "by_driver": queued and not encoded}
    for late in ("kernels", "copies"):
        assert not wrong_reads(SimulatedCuda(late=late), monkeypatch, **how)
        assert not wrong_reads(SimulatedCuda(late=late), monkeypatch, DeviceMover, threads=2, **how)
    for seed in range(20):
        assert not wrong_reads(SimulatedCuda(seed), monkeypatch, **how)
        assert not wrong_reads(SimulatedCuda(seed), monkeypatch, DeviceMover, threads=2, steps=5, **how)


def no_wait(patch):
    """The copy stream does not wait for the kernels that read the slab."""
    patch.setattr(Stream, "wait_event", lambda stream, event: None)


def no_event_at_release(patch):
    """Nothing is noted when a demand lets go of its slabs."""
    patch.setattr(DeviceMover, "released", lambda mover, geometry, slabs: None)


def done_too_early(patch):
    """A ticket is done before its copy."""
    patch.setattr(Event, "synchronize", lambda event: None)


def lease_too_short(patch):
    """The host record may be evicted before it was copied."""
    lease = HostTier.lease

    @contextlib.contextmanager
    def ended(tier, expert):
        with lease(tier, expert) as found:
            pass
        yield found

    patch.setattr(HostTier, "lease", ended)


def computed_behind_nothing(patch):
    """The compute stream does not wait for the copies of a layer that is served at once."""
    patch.setattr(DeviceMover, "_wait_behind", lambda mover, number, stream: None)


def behind_the_oldest(patch):
    """Of the kernels that read one of a layer's slabs, its copies wait for the first one."""
    patch.setattr(transfer, "itemgetter", lambda place: lambda read: -read[place])


def decoded_elsewhere(patch):
    """Decoding does not wait for the copy."""
    patch.setattr(SimulatedDecoder, "queue", lambda decoder, operation: decoder._cuda.compute.put(operation))


def read_before_it_arrives(patch):
    """The compute stream does not wait for copies that were queued."""
    patch.setattr(DeviceMover, "arrive", lambda mover, geometry, slabs: None)
    patch.setattr(DeviceMover, "begin_pass", lambda mover: None)


QUEUED = [(no_wait, "kernels"), (no_wait, "copies"), (no_event_at_release, "kernels"), (read_before_it_arrives, "copies")]
AT_ONCE = [(no_wait, "kernels"), (no_wait, "copies"), (no_event_at_release, "kernels"), (computed_behind_nothing, "copies")]
MISTAKES = [(no_wait, "kernels"), (no_event_at_release, "kernels"), (done_too_early, "copies"), (lease_too_short, "copies")]


@pytest.mark.parametrize(
    ("mistake", "late", "encoded", "queued", "by_driver"),
    [
        *((*mistake, encoded, False, False) for mistake in MISTAKES for encoded in (False, True)),
        *((*mistake, encoded, True, False) for mistake in QUEUED for encoded in (False, True)),
        *((decoded_elsewhere, "copies", True, queued, False) for queued in (False, True)),
        *((*mistake, encoded, "at once", False) for mistake in AT_ONCE for encoded in (False, True)),
        *((*mistake, False, True, True) for mistake in QUEUED),
        *((*mistake, False, "at once", True) for mistake in [*AT_ONCE, (behind_the_oldest, "kernels")]),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_order_that_is_left_out_lets_a_kernel_read_other_bytes(mistake, late, encoded, queued, by_driver, monkeypatch):
    mistake(monkeypatch)
    how = {"encoded": encoded, "queued": bool(queued), "at_once": queued == "at once", "by_driver": by_driver}
    assert wrong_reads(SimulatedCuda(late=late), monkeypatch, **how)


def filled(store: FilledStore) -> HostTier:
    """A tier that holds every expert."""
    tier = HostTier(store, (LAYERS * EXPERTS,), page_locked=False, layouts=getattr(store, "encoded", None) and (store.encoded,))
    for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
        with tier.lease(ExpertId(layer, expert)):
            pass
    return tier


def test_a_copy_that_the_device_refuses_fails_its_demand_and_nothing_else(monkeypatch):
    cuda, store, copy = SimulatedCuda(), FilledStore(), DeviceMover._copy
    cuda.install(monkeypatch)
    mover = DeviceMover(filled(store), device=torch.device("cpu"))
    pager = Pager(store.inventory, (SimulatedPool(cuda, store.layout, SLABS),), mover)
    refused = [RuntimeError("CUDA error: made up")]

    def refusing(*given):
        if refused:
            raise refused.pop()
        return copy(*given)

    monkeypatch.setattr(DeviceMover, "_copy", refusing)
    pager.begin_step(Phase.DECODE)
    with pytest.raises(TransferError, match="made up"), pager.demand(0, [3, 4]) as demand:
        list(demand.groups(in_order=False))
    with pager.demand(0, [3, 4]) as demand:
        assert [group.experts for group in demand.groups(in_order=False)] == [[3, 4]]
    pager.check_integrity()
    pager.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_pass_on_another_stream_sees_what_was_queued_for_the_one_before(waits, monkeypatch):
    """A demand was left before anything of it was computed; its expert counts as resident."""
    cuda, read = SimulatedCuda(late="copies"), []
    cuda.install(monkeypatch)
    store = FilledStore()
    mover = DeviceMover(filled(store), device=torch.device("cpu"))
    pager = Pager(store.inventory, (SimulatedPool(cuda, store.layout, SLABS),), mover)
    if not waits:
        monkeypatch.setattr(DeviceMover, "begin_pass", lambda mover: None)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [3]):
        pass
    with cuda.on(cuda.stream_of()):
        pager.begin_step(Phase.DECODE)
        slab = pager.tables[0].slab_of[3]
        cuda.launch(lambda: read.extend(SlabPool.record(pager.tables[0].pool.pools[0], slab).view(torch.int64)[:16].tolist()))
        cuda.current.synchronize()
    pager.close()
    assert (set(read) == {number(0, 3)}) == waits


def two_slabs(cuda: SimulatedCuda, patch, how: Decoding) -> tuple[DeviceMover, Slabs]:
    """A mover, and what two records shall be decoded into."""
    cuda.install(patch)
    tier = HostTier(EncodedStore(), (RECORDS,), page_locked=False, layouts=(EncodedStore.encoded,))
    return DeviceMover(tier, device=torch.device("cpu"), decoding=how), Slabs.of(SimulatedPool(cuda, FilledStore.layout, 2))


def wrong_slabs(slabs: Slabs) -> bool:
    return any(set(slabs.weights(slab)["w"].tolist()) != {number(*e)} for slab, e in enumerate([(1, 1), (0, 2)]))


def decoded_wrong(cuda: SimulatedCuda, patch, staging: SimulatedPool | None = None) -> bool:
    """Whether one of two records, copied at the same time over one stream each, is not what was decoded."""
    how = decoding(cuda)
    mover, slabs = two_slabs(cuda, patch, how if staging is None else Decoding(staging, how.decoders))
    with patch.context() as early:
        done_too_early(early)  # another thread waits for the first copy
        mover.move(Ticket(ExpertId(1, 1), 0, slab=0, speculative=True), slabs)
    mover.move(Ticket(ExpertId(0, 2), 0, slab=1), slabs)
    for stream in cuda.streams:
        stream.synchronize()
    return wrong_slabs(slabs)


def test_a_staging_slab_that_two_streams_share_is_overwritten_before_it_is_decoded(monkeypatch):
    class Shared(SimulatedPool):
        def record(self, slab):
            return super().record(0)

    assert not any(decoded_wrong(SimulatedCuda(seed, "copies"), monkeypatch) for seed in range(20))
    shared = (SimulatedCuda(seed, "copies") for seed in range(20))
    assert any(decoded_wrong(cuda, monkeypatch, Shared(cuda, EncodedStore.encoded, 1)) for cuda in shared)


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_two_threads_may_not_queue_copies_of_one_stream_between_each_other(one_at_a_time, monkeypatch):
    class Interrupted(SimulatedDecoder):
        """When the first copy is to be decoded, another thread copies over the same stream."""

        other: threading.Thread | None = None

        def __call__(self, encoded, record):
            if self.other is None:
                self.other = threading.Thread(target=mover.move, args=(Ticket(ExpertId(0, 2), 0, slab=1), slabs))
                self.other.start()
                self.other.join(0.1 if one_at_a_time else 60)
            super().__call__(encoded, record)

    cuda = SimulatedCuda()
    decoder = Interrupted(cuda)
    mover, slabs = two_slabs(cuda, monkeypatch, Decoding(decoding(cuda).staging, [decoder]))
    if not one_at_a_time:
        mover._queueing = contextlib.nullcontext(), contextlib.nullcontext()
    mover.move(Ticket(ExpertId(1, 1), 0, slab=0), slabs)
    decoder.other.join(60)
    assert wrong_slabs(slabs) != one_at_a_time


def test_half_a_copy_can_be_seen(monkeypatch):
    """Otherwise the proof above would miss a kernel that runs beside the copy."""
    done_too_early(monkeypatch)
    assert any(len(read) > 1 for seed in range(20) for _, read in wrong_reads(SimulatedCuda(seed), monkeypatch))


@pytest.mark.parametrize("unasked", [{"speculative": True}, {"transition": True}, {"fills": True}], ids=str)
def test_a_demanded_copy_does_not_wait_for_one_that_nothing_demanded(unasked, monkeypatch):
    cuda, computed = SimulatedCuda(late="kernels"), []
    cuda.install(monkeypatch)
    store = FilledStore()
    mover = DeviceMover(HostTier(store, (RECORDS,), page_locked=False), device=torch.device("cpu"))
    slabs = Slabs.of(SimulatedPool(cuda, store.layout, 2))
    cuda.launch(functools.partial(computed.append, "a long kernel that reads slab 0"))
    mover.released(0, np.array([0]))
    with monkeypatch.context() as patch:
        done_too_early(patch)  # the thread that copies the guess waits elsewhere
        mover.move(Ticket(ExpertId(1, 1), 0, slab=0, **unasked), slabs)
    mover.move(Ticket(ExpertId(0, 2), 0, slab=1), slabs)
    assert not computed and slabs.weights(1)["w"].tolist() == [number(0, 2)] * 16
    cuda.streams[-1].synchronize()
    assert computed and slabs.weights(0)["w"].tolist() == [number(1, 1)] * 16


@pytest.mark.parametrize("unasked", [False, True])
def test_slabs_in_memory_that_a_queued_kernel_still_writes_are_filled_after_it(unasked, monkeypatch):
    """torch gives freed memory to the next tensor as soon as everything on its stream is queued."""
    cuda = SimulatedCuda(late="kernels")
    cuda.install(monkeypatch)
    store = FilledStore()
    slabs = Slabs.of(SimulatedPool(cuda, store.layout, 2))
    cuda.launch(lambda: slabs.pools[0].buffer.fill_(7))
    mover = DeviceMover(HostTier(store, (RECORDS,), page_locked=False), device=torch.device("cpu"))
    mover.move(Ticket(ExpertId(1, 1), 0, slab=0, speculative=unasked), slabs)
    cuda.compute.synchronize()
    assert slabs.weights(0)["w"].tolist() == [number(1, 1)] * 16


class Copied:
    """A lookahead whose scores are its snapshot: the layer that it saw."""

    def __init__(self, cuda: SimulatedCuda):
        self._cuda = cuda

    def snapshot(self, seen: Seen) -> torch.Tensor:
        snapshot = torch.zeros(4)
        self._cuda.copy(snapshot, torch.full((4,), float(seen.layer)))
        return snapshot

    def evaluate(self, snapshot: torch.Tensor) -> np.ndarray:
        return on_host(SimulatedTensor(self._cuda, snapshot))[0].copy()


def wrong_scores(cuda: SimulatedCuda, patch, layers: int = 5) -> list[tuple[int, np.ndarray]]:
    """(layer, scores) where a lookahead read something else than what the model's stream had snapshot for it."""
    cuda.install(patch)
    told = queue.SimpleQueue()
    ahead = BackgroundLookahead(
        Copied(cuda), lambda tick, layer, scores: told.put((layer, scores)), inline=False, gpu=SimulatedTensor.device
    )
    later: list[int] = []
    found = []
    for layer in range(1, layers + 1):
        ahead.ask(Seen(layer, True, np.zeros((1, 1), np.int64), torch.zeros(1, 4)), tick=layer)
        cuda.launch(functools.partial(later.append, layer))
        found.append(told.get(timeout=60))
        assert cuda.late != "kernels" or layer not in later, "the lookahead waited for what the model does after the snapshot"
    ahead.close()
    return [(layer, scores) for layer, scores in found if (scores != layer).any()]


def test_a_lookahead_reads_what_the_model_made_for_it_and_waits_for_nothing_after_it(monkeypatch):
    for cuda in [SimulatedCuda(late="kernels"), SimulatedCuda(late="copies"), *map(SimulatedCuda, range(20))]:
        assert not wrong_scores(cuda, monkeypatch)
        assert [stream.priority for stream in cuda.streams] == [0, -1], "lower is sooner"


def no_wait_for_the_readback(patch):
    """The host reads before the copy to it has ended."""
    patch.setattr(Stream, "synchronize", lambda stream: None)


@pytest.mark.parametrize(("mistake", "late"), [(no_wait, "kernels"), (no_wait_for_the_readback, "copies")])
def test_each_order_of_the_lookahead_that_is_left_out_shows(mistake, late, monkeypatch):
    mistake(monkeypatch)
    assert len(wrong_scores(SimulatedCuda(late=late), monkeypatch)) == 5


class Driver:
    """Of the CUDA driver, what queues copies; the memory of the device is the host's."""

    def __init__(self, batch: int | None = 0, one: int = 0):
        self.calls: list[str] = []
        if batch is not None:
            self.cuMemcpyBatchAsync_v2 = functools.partial(self.copy_all, batch)

        def put(there, here, nbytes, stream):
            self.calls.append("one")
            ctypes.memmove(there, here, nbytes)
            return one

        self.cuMemcpyHtoDAsync_v2 = put

    def __getitem__(self, name):
        return getattr(self, name)

    def copy_all(self, status, there, here, sizes, count, attributes, first, kinds, stream):
        self.calls.append("all")
        assert bytes(attributes._obj) == bytes([1, *[0] * 23]) and list(first) == [0] and kinds.value == 1 and stream.value == 7
        places = [ctypes.cast(array, ctypes.POINTER(ctypes.c_uint64)) for array in (there, here, sizes)]
        for i in range(0 if status else count.value):
            ctypes.memmove(*(place[i] for place in places))
        return status


@pytest.mark.parametrize(
    "driver, calls",
    [(Driver(), ["all", "all", "one"]), (Driver(batch=None), ["one"] * 5), (Driver(batch=1), ["all"] + ["one"] * 5)],
)
def test_copies_are_queued_by_one_call_where_the_driver_takes_it(driver, calls, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    copy, records, slabs = (
        copier(SimpleNamespace(cuda_stream=7)),
        torch.arange(6).view(2, 3),
        torch.zeros(2, 3, dtype=torch.int64),
    )
    there, here = (np.array([row.data_ptr() for row in rows]) for rows in (slabs, records))
    for some in (slice(2), slice(2), slice(1)):
        slabs.zero_()
        copy(there[some], here[some], 24)
        assert torch.equal(slabs[some], records[some]) and not slabs[2 if some.stop == 2 else 1 :].any()
    assert driver.calls == calls


def test_a_copy_that_the_driver_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(batch=None, one=700))
    there, here = torch.zeros(3), torch.ones(3)
    with pytest.raises(TransferError, match=r"12 bytes .* CUDA error 700"):
        copier(SimpleNamespace(cuda_stream=7))(np.array([there.data_ptr()]), np.array([here.data_ptr()]), 12)
