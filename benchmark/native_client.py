"""A client of SGLang's own HTTP API, which a stage serves on its Unix socket."""

import httpx

from sglang_live.stages.spec import StageSpec


def native_client(
    spec: StageSpec, timeout_s: float, limits: httpx.Limits | None = None
) -> httpx.AsyncClient:
    """Its URLs are paths, for instance "/generate"."""
    socket = httpx.AsyncHTTPTransport(uds=spec.native_socket, limits=limits or httpx.Limits())
    return httpx.AsyncClient(
        transport=socket,
        base_url="http://native",
        headers={"authorization": f"Bearer {spec.native_key}"},
        timeout=timeout_s,
    )
