"""What serves a model's experts by one plan: pools, mover, pager, arithmetic and, where formats are chosen, the policy.

Made when a model is loaded and whenever its plan changes; everything allocated here is in the plan.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from vismoe.machine.profile import load_profile
from vismoe.metrics import Metrics
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import stack_of
from vismoe.models.load.host_rates import NOMINAL_CPU_BYTES_PER_S, NOMINAL_LINK_BYTES_PER_S, link_rate
from vismoe.models.load.opening import Experts
from vismoe.models.load.origin import Opened
from vismoe.models.moe.compute import ExpertBackend, FastExperts, TorchExperts
from vismoe.models.moe.experts import ExpertBackends
from vismoe.models.moe.format_choice import FormatChooser
from vismoe.models.moe.heavy_hitters import HeavyHitters
from vismoe.paging.miss import Rates
from vismoe.paging.pager import Pager
from vismoe.paging.transfer import DeviceMover, DiskMover, EmulatedLinkMover, Mover
from vismoe.paging.upgrades import Upgrades
from vismoe.planning.plan import Plan
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.precision.controller import Precision
from vismoe.precision.hotness import Hotness
from vismoe.precision.policy import Policy
from vismoe.types import HIGH

__all__ = ["serve"]

NOMINAL_DISK_BYTES_PER_S = 2e9  # an NVMe disk of few years, as it is reached
NOMINAL_GPU_BYTES_PER_S = 1e12  # of weights that a GPU reads from its own memory


def serve(
    model: Any, opened: Opened, device: torch.device, metrics: Metrics | None = None, hotness: Hotness | None = None
) -> tuple[ExpertBackends, dict[str, str]]:
    """(what serves, what was chosen and why). `metrics` go on counting; `hotness` is what an earlier plan has learned.

    Under hotness every expert is brought in before this returns, otherwise the pinned prefix.
    """
    settings, experts, plan, inventory = opened.settings, opened.experts, opened.plan, opened.experts.inventory
    mover = _mover(opened, device)
    ways = experts.ways
    if ways is not None and ways.deterministic and sum(plan.host_slabs) < plan.total_experts:
        ways = None  # what lies in host memory depends on when it was read
    about = {"kernels": experts.backend, "mover": type(mover).__name__, "reads": "; ".join(plan.reading)}
    about["misses"] = f"{settings.misses}: {ways.rates[0]}" if ways is not None else "wait"
    policy = Policy.of(settings) if settings.pair is not None else None
    upgrades = None
    if policy is not None:
        upgrades = Upgrades(policy, (_upgrade_rates(opened, device),) * len(inventory.layouts), settings.deterministic)
    pager = Pager(
        inventory,
        _pools(opened, device),
        mover,
        order=settings.eviction,
        window=settings.window,
        pinned_layers=plan.pinned_layers,
        threads=1 if settings.deterministic else plan.io_threads,  # one reads in the order of the demands
        ways=ways,
        upgrades=upgrades,
        deterministic=settings.deterministic and policy is not None,
        metrics=metrics,
    )
    try:
        chooser = _chooser(model, opened, policy, hotness) if policy is not None else None
        about["policy"] = "exact" if policy is None else f"{settings.policy}, {settings.pair}{chooser.about if chooser else ''}"
        bringing, total = _bring_in(pager, chooser, plan)
        for _ in tqdm(bringing, "Bringing in experts", total, unit="expert", delay=1, disable=None):
            pass
    except BaseException:
        pager.close()
        raise
    store = opened.stores.by_precision[HIGH]
    return ExpertBackends(pager, _backend(experts, device), plan, store, experts.formats, chooser), about


def _pools(opened: Opened, device: torch.device) -> list[list[SlabPool]]:
    """Per geometry a pool for each format, pinned experts included."""
    inventory, plan = opened.experts.inventory, opened.plan
    pinned = [0] * len(inventory.layouts)
    for layer in inventory.layers[: plan.pinned_layers]:
        pinned[layer.geometry] += layer.num_experts
    aliased = opened.settings.emulated_link_bytes_per_s is not None
    pools = []
    for geometry, layout in enumerate(inventory.layouts):
        pools.append([SlabPool(layout, plan.slabs[geometry] + pinned[geometry], device, aliased=aliased)])
        if inventory.low_layouts:
            pools[-1].append(SlabPool(inventory.low_layouts[geometry], plan.low_slabs[geometry], device, aliased=aliased))
    return pools


def _mover(opened: Opened, device: torch.device) -> Mover:
    stores, plan = opened.stores.by_precision, opened.plan
    emulated = opened.settings.emulated_link_bytes_per_s
    if emulated is None and device.type != "cuda":
        return DiskMover(*stores)
    records = (plan.host_slabs, plan.low_host_slabs)[: len(stores)]
    hosts = [HostTier(store, slabs, page_locked=emulated is None) for store, slabs in zip(stores, records, strict=True)]
    return DeviceMover(*hosts, device=device) if emulated is None else EmulatedLinkMover(*hosts, bytes_per_s=emulated)


def _upgrade_rates(opened: Opened, device: torch.device) -> Rates:
    """Of what an upgrade comes over, and of computing beside it; nominal where it has to follow from bytes alone."""
    settings = opened.settings
    profile = None if settings.deterministic else load_profile()
    if device.type == "cuda":
        return Rates(link_rate(profile, device) or NOMINAL_LINK_BYTES_PER_S, NOMINAL_GPU_BYTES_PER_S)
    computing = profile.dram_bytes_per_s if profile else NOMINAL_CPU_BYTES_PER_S
    return Rates(settings.emulated_link_bytes_per_s or NOMINAL_DISK_BYTES_PER_S, computing)


def _chooser(model: Any, opened: Opened, policy: Policy, hotness: Hotness | None) -> FormatChooser:
    inventory, settings = opened.experts.inventory, opened.settings
    experts = [layer.num_experts for layer in inventory.layers]
    quotas = np.array(opened.plan.hot_quota) if policy.hotness else None
    if policy.hotness and hotness is None and settings.hotness_state and Path(settings.hotness_state).expanduser().exists():
        hotness = Hotness(experts, policy.decay, policy.period_tokens)
        hotness.load(Path(settings.hotness_state).expanduser(), opened.stores.fingerprint)
    deep = [not is_vision(stack_of(layer.path)) for layer in inventory.layers]
    precision = Precision(policy, experts, quotas, hotness, deep)
    hitters: HeavyHitters | str = "not asked for"
    if policy.importance:
        hitters = HeavyHitters.of(model, inventory.layers)
    return FormatChooser(precision, inventory, hitters, settings.deterministic)


def _bring_in(pager: Pager, chooser: FormatChooser | None, plan: Plan) -> tuple[Any, int]:
    """(experts as they arrive, how many there are)."""
    if chooser is None or not chooser.precision.policy.hotness:
        return pager.pin_prefix(), sum(layer.num_experts for layer in pager.inventory.layers[: plan.pinned_layers])
    high = chooser.precision.targets
    if not high.any():  # nobody is known to be hot yet
        high = np.arange(high.shape[1]) < np.array(plan.hot_quota)[:, None]
    return pager.bring_in_all(high), plan.total_experts


def _backend(experts: Experts, device: torch.device) -> ExpertBackend:
    """Who computes the experts of a layer."""
    if experts.kernels is not None:
        return FastExperts(experts.inventory, experts.kernels)
    on_host = FastExperts(experts.inventory, experts.host_kernels) if experts.host_kernels is not None else None
    return TorchExperts(experts.inventory, experts.codecs, device, on_host)
