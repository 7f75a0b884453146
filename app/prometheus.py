"""The content of `/metrics`: the engine's counters in Prometheus' text form, read on demand and not stored.

Every counter of the pager is reported per phase (hit rate: hits over hits and misses); bytes and seconds are base units. Labels
have few values with any model: phases, formats, parts of the plan, and the chosen backends.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vismoe.metrics import PHASES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from vismoe.app.request_memory import RequestMemory
    from vismoe.engine.engine import Engine

REASON = re.compile(r"\s*[(:;,]")  # where the reasons begin, which contain measured rates and paths of this machine
PAGER_COUNTERS = {  # counter of vismoe.metrics: (name here without _total, help text)
    "hits": ("vismoe_expert_hits", "Demands for experts that were resident"),
    "misses": ("vismoe_expert_misses", "Demands for experts that were not resident"),
    "late": ("vismoe_expert_late_prefetches", "Misses whose prefetch was in progress"),
    "computed_on_host": ("vismoe_expert_host_computations", "Misses computed in host memory instead of copied"),
    "evictions": ("vismoe_expert_evictions", "Experts evicted from their slab"),
    "bytes_read": ("vismoe_expert_read_bytes", "Bytes of experts read from disk"),
    "bytes_copied": ("vismoe_expert_copied_bytes", "Bytes of experts copied between host and device"),
    "bytes_computed_on_host": ("vismoe_expert_host_computed_bytes", "Bytes of experts computed in host memory"),
    "stall_seconds": ("vismoe_expert_stall_seconds", "Time in which the model waited for experts"),
    "compute_seconds": ("vismoe_expert_compute_seconds", "Time of the experts' arithmetic"),
    "layer_seconds": ("vismoe_expert_layer_seconds", "Time in MoE layers: stalls, arithmetic and control"),
    "prefetched_bytes": ("vismoe_expert_prefetched_bytes", "Bytes of experts copied before a token demanded them"),
    "wasted_prefetch_bytes": ("vismoe_expert_wasted_prefetch_bytes", "Bytes of experts that were guessed and never demanded"),
    "promised": ("vismoe_expert_promises", "Experts that draft passes named"),
    "foreseen": ("vismoe_expert_foreseen", "Experts that draft passes named and verification demanded"),
    "promised_bytes": ("vismoe_expert_promised_bytes", "Bytes of experts copied since draft passes named them"),
    "wasted_promised_bytes": (
        "vismoe_expert_wasted_promised_bytes",
        "Bytes of experts copied since draft passes named them that verification found no use for",
    ),
    "steps": ("vismoe_expert_layer_steps", "Times that an MoE layer ran"),
    "served_lower": ("vismoe_expert_served_lower", "Experts needed in the better format but served in the other"),
    "promotions": ("vismoe_expert_promotions", "Experts that moved to the better format in the background"),
    "demotions": ("vismoe_expert_demotions", "Experts that moved to the other format in the background"),
    "streamed": ("vismoe_expert_streamed_layer_steps", "Times that an MoE layer ran in a streamed pass"),
    "unstreamed_unmeasured": (
        "vismoe_expert_unstreamed_unmeasured_layer_steps",
        "Times that an MoE layer ran unstreamed since no pass of about as many tokens had been measured",
    ),
    "unstreamed_small_pool": (
        "vismoe_expert_unstreamed_small_pool_layer_steps",
        "Times that an MoE layer ran unstreamed since the ring would have taken more than half of the slabs",
    ),
    "unstreamed_no_gain": (
        "vismoe_expert_unstreamed_no_gain_layer_steps",
        "Times that an MoE layer ran unstreamed since streaming would not have been clearly sooner",
    ),
    "failed_transitions": ("vismoe_expert_failed_transitions", "Moves between formats that failed; the old copy remained in use"),
}
COMPUTED = ("vismoe_expert_computations", "Experts computed for a token, by their format; skip: not computed")
REQUEST_COUNTERS = {  # field of Engine.load: (name, what it counts)
    "requests": ("vismoe_requests", "Requests that ended for any reason"),
    "cancelled": ("vismoe_requests_cancelled", "Requests that were cancelled or whose client went away"),
    "failed": ("vismoe_requests_failed", "Requests that ended with an error"),
}
LOAD_GAUGES = {
    "running": ("vismoe_requests_running", "Requests that are being answered"),
    "waiting": ("vismoe_requests_waiting", "Requests that wait for room in the planned context"),
    "context_tokens": ("vismoe_context_tokens", "Tokens of context that running requests use"),
    "reusable_tokens": ("vismoe_reusable_tokens", "Tokens of context kept for a later turn"),
    "image_cache_bytes": ("vismoe_image_cache_bytes", "Bytes of encoded images kept for a later turn"),
}
MEMORY_GAUGES = {  # of RequestMemory
    "total_bytes": ("vismoe_request_memory_bytes", "What requests and decoders may hold beside the model"),
    "used_bytes": ("vismoe_request_memory_used_bytes", "Bytes reserved for requests and decoders"),
    "waiting": ("vismoe_requests_waiting_for_memory", "Requests that wait for request memory"),
}
PACE_GAUGES = {
    "planned_rows": ("vismoe_plan_rows", "Requests that memory was planned for in one decode pass"),
    "most_rows": ("vismoe_decode_rows_limit", "Requests that may decode in one pass now, by --latency and what passes took"),
    "rows": ("vismoe_decode_rows", "Requests in the latest decode passes, on average"),
    "tokens_per_s": ("vismoe_decode_tokens_per_second", "Tokens that the latest decode passes gave in a second of them"),
    "context_tokens": (
        "vismoe_context_tokens_limit",
        "Tokens of context for all requests together, with what experts have lent",
    ),
    "released_bytes": ("vismoe_expert_lent_bytes", "Bytes of experts' memory lent to keys and values of requests"),
    "expected_tokens_per_s": (
        "vismoe_decode_expected_tokens_per_second",
        "The same as fitted to passes of any number of requests; before the first pass as planned",
    ),
}
PLAN_GAUGES = {
    "budget_bytes": ("vismoe_plan_budget_bytes", "The memory budget"),
    "context": ("vismoe_plan_context_tokens", "Tokens that memory was planned for"),
    "resident_experts": ("vismoe_plan_resident_experts", "Experts that fit in memory at the same time"),
    "total_experts": ("vismoe_plan_experts", "Experts of the model"),
}


def metrics_text(engine: "Engine", memory: "RequestMemory") -> str:
    """The exposition, of content type `prometheus_client.CONTENT_TYPE_LATEST`."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(engine, memory))
    return generate_latest(registry).decode()


class _Families:
    def __init__(self, engine: "Engine", memory: "RequestMemory"):
        self._engine, self._memory = engine, memory

    def collect(self) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        engine, load, snapshot = self._engine, self._engine.load, self._engine.metrics.snapshot()
        kind = {field: getattr(engine.plan, field) for field in ("family", "dtype", "device")}
        yield InfoMetricFamily("vismoe_model", "The running model", value=kind)
        backends = GaugeMetricFamily("vismoe_backend_info", "Choices made at start", labels=["backend", "choice"])
        for name, choice in engine.backends.items():
            backends.add_metric([name, REASON.split(choice)[0]], 1)
        yield backends
        for counter, (name, text) in PAGER_COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=["phase"])
            for phase in PHASES:
                family.add_metric([phase], snapshot.total(counter, phase))
            yield family
        computed = CounterMetricFamily(*COMPUTED, labels=["phase", "format"])
        for (phase, format), count in engine.metrics.computed_in.items():
            computed.add_metric([phase, format], count)
        yield computed
        resident = GaugeMetricFamily("vismoe_experts_resident", "Experts on the device now, by format", labels=["format"])
        formats = engine.formats()
        for place, format in enumerate(engine.format_names):
            resident.add_metric([format], int((formats == 1 + place).sum()))
        yield resident
        precision = engine.precision
        chosen = {"policy": precision.policy, "formats": precision.formats} if precision else {"policy": "exact", "formats": ""}
        yield InfoMetricFamily("vismoe_precision", "The policy that chooses formats now, and its pair of formats", value=chosen)
        for field, (name, text) in REQUEST_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(load, field))
        gauges = ((load, LOAD_GAUGES), (self._memory, MEMORY_GAUGES), (engine.pace, PACE_GAUGES), (engine.plan, PLAN_GAUGES))
        for source, table in gauges:
            for field, (name, text) in table.items():
                yield GaugeMetricFamily(name, text, value=getattr(source, field))
        planned = GaugeMetricFamily(
            "vismoe_plan_tokens_per_second", "Tokens per second that the plan expects, by requests in a pass", labels=["rows"]
        )
        for one in engine.plan.passes:
            planned.add_metric([str(one.rows)], one.tokens_per_s)
        yield planned
        parts = GaugeMetricFamily("vismoe_plan_bytes", "Planned bytes, by tier and part", labels=["tier", "part"])
        for tier, of_tier in (("device", engine.plan.parts), ("host", engine.plan.host_parts)):
            for part in of_tier:
                if not part.inside:  # other parts include these bytes already
                    parts.add_metric([tier, part.name], part.bytes)
        yield parts
