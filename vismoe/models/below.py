"""Computing misses below the device, in host memory: whether it can be done here, and at which rates it is weighed.

The rates are the link's and host memory's, as `vismoe doctor` measured them, or nominal ones where nobody has; `deterministic`
takes the nominal ones always, so that a choice depends on bytes and tokens alone.
"""

import torch

from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.machine.profile import Profile, load_profile
from vismoe.models.opening import Experts
from vismoe.paging.miss import Rates, Ways

__all__ = ["ways_for"]

NOMINAL_LINK_BYTES_PER_S = 25e9  # PCIe 4.0 x16, as it is reached
NOMINAL_CPU_BYTES_PER_S = 40e9  # two channels of DDR5


def ways_for(settings: Settings, experts: Experts, device: torch.device, has_host_tier: bool) -> Ways | None:
    """What may be done about misses; None where they wait. Raises ConfigError for misses='cpu' where that cannot be."""
    why_not = None
    if not has_host_tier:
        why_not = "there is no host memory below the device here: the experts are in RAM or on disk"
    elif experts.host_kernels is None:
        why_not = f"the experts are computed by {experts.arithmetic}"
    if why_not and settings.misses == "cpu":
        raise ConfigError(f"misses='cpu': {why_not}. Fix: misses='auto' (--misses auto)")
    if why_not or settings.misses == "wait":
        return None
    rates = _rates(settings, device)
    return Ways(settings.misses, (rates,) * len(experts.inventory.layouts), settings.deterministic)


def _rates(settings: Settings, device: torch.device) -> Rates:
    profile = None if settings.deterministic else load_profile()
    link = settings.emulated_link_bytes_per_s or _link(profile, device) or NOMINAL_LINK_BYTES_PER_S
    return Rates(link, profile.dram_bytes_per_s if profile else NOMINAL_CPU_BYTES_PER_S)


def _link(profile: Profile | None, device: torch.device) -> float | None:
    """Of page-locked copies to the GPU."""
    rates = profile.link(str(device)) if profile else None
    return rates.best_bytes_per_s(page_locked=rates.page_lock_refused is None) if rates else None
