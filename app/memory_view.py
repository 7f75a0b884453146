"""HTML of the memory plan, as a bar with a table, and of the chosen backends with their reasons. Pure."""

from html import escape
from typing import Any

from vismoe.app.options import served_name
from vismoe.config import format_bytes

SHADES = 8  # colours of the bar, used in turn
LEAST_SHARE = 0.01  # share of a tier's bytes; the bar combines smaller parts


def head(name: str, plan: Any = None) -> str:
    """HTML of the page's first line: the model, and how many experts memory holds."""
    if plan is None:
        return f'<div class="vm-head"><h1>VisMoE</h1><span>{escape(name)}</span></div>'
    held = f"{plan.resident_experts} of {plan.total_experts} experts ({plan.resident_experts / plan.total_experts:.0%})"
    return (
        f'<div class="vm-head"><h1>VisMoE</h1><span>{escape(served_name(name))}</span>'
        f"<span>memory {escape(f'{plan.memory}: {held} in {format_bytes(plan.total_bytes)}')}</span></div>"
    )


def memory_plan(plan: Any, folded: bool = False) -> str:
    """HTML of a `Plan`: for each tier one bar, and its parts, which `folded` hides until they are asked for."""
    places = [(f"on the {plan.device}", plan.parts), ("in host memory", plan.host_parts)]
    return "".join(_place(name, parts, folded) for name, parts in places if parts)


def _place(name: str, parts: Any, folded: bool) -> str:
    summands = sorted((part for part in parts if not part.inside and part.bytes), key=lambda part: -part.bytes)
    total = sum(part.bytes for part in summands)
    segments, rows, small = [], [], 0
    for number, part in enumerate(summands):
        shade = f"vm-s{number % SHADES}"
        if part.bytes < LEAST_SHARE * total:
            small += part.bytes
            shade = "vm-queue"
        else:
            segments.append(_segment(shade, part.name, part.bytes, total))
        rows.append(
            f'<tr><td><i class="{shade}"></i></td><th>{escape(part.name)}</th><td>{format_bytes(part.bytes)}</td>'
            f"<td>{escape(part.note)}</td></tr>"
        )
    if small:
        segments.append(_segment("vm-queue", "the rest", small, total))
    table = f'<div class="vm-scroll"><table class="vm-parts">{"".join(rows)}</table></div>'
    table = f"<details><summary>What it is for</summary>{table}</details>" if folded else table
    return f'<p><b>{format_bytes(total)}</b> {escape(name)}</p><div class="vm-stack">{"".join(segments)}</div>{table}'


def _segment(shade: str, name: str, nbytes: int, total: int) -> str:
    return f'<i class="{shade}" style="width:{100 * nbytes / total:.2f}%" title="{escape(name)}: {format_bytes(nbytes)}"></i>'


def backends_table(backends: dict[str, str]) -> str:
    """HTML of the chosen backends, and the reasons."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(choice)}</td></tr>" for name, choice in backends.items())
    return f'<div class="vm-scroll"><table class="vm-parts">{rows}</table></div>'
