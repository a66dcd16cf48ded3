"""Samples of /v1/capacity during a run: use of the KV pools, admitted sessions."""

import asyncio
import time

import httpx


class Watch:
    """samples: one dict per second: at_s, and the fields of /v1/capacity."""

    def __init__(self, port: int):
        self._url = f"http://127.0.0.1:{port}/v1/capacity"
        self.samples: list[dict] = []

    async def run(self, began_s: float) -> None:
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                answer = (await client.get(self._url)).json()
                thinker = answer["kv"].get("thinker", {})
                self.samples.append(
                    {
                        "at_s": round(time.monotonic() - began_s, 2),
                        "open": answer["sessions"]["open"],
                        "limit": answer["sessions"]["limit"],
                        "share": thinker.get("share"),
                        "saturates_in_s": thinker.get("saturates_in_s"),
                        "budget_share": answer["budget_share"],
                    }
                )
                await asyncio.sleep(1.0)


def saturated_s(samples: list[dict], full: float = 0.97) -> float | None:
    """Time at which the pool was first full, or None."""
    return next((s["at_s"] for s in samples if (s["share"] or 0) >= full), None)


def predicted_s(samples: list[dict], low: float = 0.1, high: float = 0.5) -> float | None:
    """Time at which the pool is full by a linear fit of the early part (Metronome, equation 1).

    None if the pool never was half full.
    """
    early = [(s["at_s"], s["share"]) for s in samples if s["share"] is not None]
    first_high = next((i for i, (_, share) in enumerate(early) if share >= high), None)
    if first_high is None:
        return None
    points = [point for point in early[: first_high + 1] if point[1] >= low]
    if len(points) < 3:
        return None
    n = len(points)
    mean_t, mean_s = (sum(p[i] for p in points) / n for i in (0, 1))
    slope = sum((t - mean_t) * (s - mean_s) for t, s in points)
    slope /= sum((t - mean_t) ** 2 for t, _ in points)
    return mean_t + (1 - mean_s) / slope
