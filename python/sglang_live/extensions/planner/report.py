"""A plan as text, and as JSON."""

import shlex
from dataclasses import asdict
from typing import Any

from sglang_live.extensions.planner.layouts import command
from sglang_live.extensions.planner.memory import GpuMemory, Memory
from sglang_live.extensions.planner.search import Plan, Served

_FIRST_PORT = 30000
# Sessions admitted beyond the simulated number: the policy `admission` finds the real one.
_MORE_SESSIONS = 1.25


def commands(plan: Plan) -> list[list[str]]:
    """Arguments of launch_server, one list for each server."""
    layout, sessions = plan.best.layout, round(_MORE_SESSIONS * plan.best.found.users)
    return [
        command(
            layout,
            plan.best.memory,
            model_path=plan.config.model_path,
            first_gpu=number * layout.n_gpus,
            port=_FIRST_PORT + number,
            sessions=sessions,
        )
        for number in range(plan.n_servers)
    ]


def text(plan: Plan) -> str:
    config, best, pattern = plan.config, plan.best, plan.config.pattern
    lines = [
        f"{config.n_gpus} x {config.gpu.name}, {config.sizes.name}: {plan.users} users at once, "
        f"{best.users_per_gpu:.0f} per GPU (simulated, modelled device: {config.model.name})",
        f"target: P90 of first audio {config.slo.first_audio_ms:g} ms, "
        f"{100 * config.slo.continuous:g} % of responses continuous",
        f"users: {pattern.talk_s:g} s a turn, responses of {pattern.response_s:g} s, "
        f"{100 * pattern.interruptions:g} % interrupted, sessions of {pattern.session_min:g} min",
        "",
        *_layouts(plan),
        "",
        f"{plan.n_servers} servers of {best.layout.n_gpus} GPUs: {best.layout.name}"
        if plan.n_servers > 1
        else f"One server: {best.layout.name}",
        f"bound: {best.bound}",
        "",
        *_memory(best.memory, pattern.session_tokens),
        *_money(plan),
        "",
        "Start with:",
    ]
    for argv in commands(plan):
        lines += ["", f"python -m sglang_live.launch_server {shlex.join(argv)}"]
    return "\n".join(lines)


def _layouts(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("layout of one server", "GPUs", "users", "per GPU", "first audio P90", "continuous")
    ]
    rows += [_row(one) for one in plan.served]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(one: Served) -> tuple[str, ...]:
    p90_ms, continuity = one.point.ttfp_after_detection_ms.p90, one.point.continuity
    return (
        one.layout.name,
        str(one.layout.n_gpus),
        str(one.found.users),
        f"{one.users_per_gpu:.0f}",
        f"{p90_ms:.0f} ms" if p90_ms is not None else "n/a",
        f"{100 * continuity:.1f} %" if continuity is not None else "n/a",
    )


def _memory(memory: Memory, session_tokens: int) -> list[str]:
    lines = []
    for gpu in memory.gpus:
        lines.append(f"GPU {gpu.device} of a server, {gpu.free_gib:g} GiB free at first")
        lines += [f"  {part.gib:6.1f} GiB  {part.name}" for part in gpu.parts]
        lines.append(f"  {gpu.spare_gib:6.1f} GiB  spare")
    held = memory.thinker_tokens // session_tokens
    lines.append(
        f"A session holds {session_tokens:,} tokens at its end: {held} have all their KV on a "
        "thinker's GPU, others on the host"
    )
    return lines


def _money(plan: Plan) -> list[str]:
    config, lines = plan.config, []
    if plan.price_per_talk_hour is not None and config.price is not None:
        per_day = config.price * config.n_gpus * config.hours
        lines.append(
            f"cost: {plan.price_per_talk_hour:.4f} for an hour of one session, if all are used; "
            f"{per_day:.2f} a day of {config.hours:g} hours"
        )
    if plan.gpus_needed is not None:
        lines.append(
            f"{config.sessions_per_hour:g} sessions an hour: {plan.users_at_peak} at once, "
            f"{plan.gpus_needed} GPUs"
        )
    return ["", *lines] if lines else []


def document(plan: Plan) -> dict[str, Any]:
    config, best = plan.config, plan.best
    return {
        "gpu": config.gpu.name,
        "n_gpus": config.n_gpus,
        "simulated": config.model.facts(),
        "model": config.sizes.name,
        "target": asdict(config.slo),
        "pattern": asdict(config.pattern),
        "n_servers": plan.n_servers,
        "users": plan.users,
        "users_per_gpu": round(best.users_per_gpu, 1),
        "bound": best.bound,
        "layout": _layout(best),
        "layouts": [_layout(one) for one in plan.served],
        "memory": [_gpu(gpu) for gpu in best.memory.gpus],
        "session_tokens": config.pattern.session_tokens,
        "price_per_talk_hour": plan.price_per_talk_hour,
        "users_at_peak": plan.users_at_peak,
        "gpus_needed": plan.gpus_needed,
        "commands": commands(plan),
    }


def _layout(one: Served) -> dict[str, Any]:
    return {
        "name": one.layout.name,
        **asdict(one.layout.placement),
        "users": one.found.users,
        "users_per_gpu": round(one.users_per_gpu, 1),
        "first_audio_p90_ms": one.point.ttfp_after_detection_ms.p90,
        "continuous": one.point.continuity,
        "thinker_tokens": one.memory.thinker_tokens,
        "talker_tokens": one.memory.talker_tokens,
        "fp8": one.memory.fp8,
    }


def _gpu(gpu: GpuMemory) -> dict[str, Any]:
    return {
        "device": gpu.device,
        "free_gib": gpu.free_gib,
        "parts": {part.name: round(part.gib, 2) for part in gpu.parts},
        "spare_gib": round(gpu.spare_gib, 2),
    }
