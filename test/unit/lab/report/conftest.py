import json

import pytest


@pytest.fixture
def timeline() -> dict:
    """Two turns: the first response is interrupted, the second stalls once and is played out."""
    first, second = {"response": "resp_1"}, {"response": "resp_2"}
    events = [
        {"t_s": 0.9, "event": "speech_suspected", "onset_t_s": 0.8},
        {"t_s": 1.0, "event": "speech_started", "onset_t_s": 0.8},
        {"t_s": 3.4, "event": "speech_stopped"},
        {"t_s": 3.45, "event": "response_created", **first},
        {"t_s": 3.7, "event": "first_audio", **first},
        {"t_s": 4.7, "event": "sent", "sent_s": 3.0, "heard_s": 1.0, "generated_s": 3.5, **first},
        {"t_s": 5.0, "event": "held", **first},
        {"t_s": 5.5, "event": "released", **first},
        {"t_s": 5.7, "event": "speech_suspected", "onset_t_s": 5.6},
        {"t_s": 5.8, "event": "speech_started", "onset_t_s": 5.6},
        {"t_s": 5.8, "event": "barge_in", "sent_s": 4.0, "heard_s": 2.1, **first},
        {"t_s": 5.9, "event": "response_done", "status": "cancelled", **first},
        {"t_s": 6.0, "event": "truncated", "heard_s": 2.05, **first},
        {"t_s": 7.5, "event": "speech_stopped"},
        {"t_s": 7.6, "event": "response_created", **second},
        {"t_s": 8.0, "event": "first_audio", "sent_s": 0.5, "heard_s": 0.0, **second},
        {"t_s": 8.5, "event": "dry", "heard_s": 0.5, **second},
        {"t_s": 8.75, "event": "playing", "heard_s": 0.5, **second},
        {"t_s": 9.0, "event": "sent", "sent_s": 3.0, "heard_s": 0.75, **second},
        {"t_s": 9.1, "event": "response_done", "status": "completed", **second},
        {"t_s": 9.3, "event": "speech_suspected", "onset_t_s": 9.2},
        {"t_s": 9.5, "event": "speech_dismissed"},
    ]
    return {"session": "sess_7", "began_unix_s": 1.7e9, "events": events, "dropped": 2}


@pytest.fixture
def load() -> dict:
    def point(policies: str, sessions: int, p90_ms: float | None, waste: float | None) -> dict:
        return {
            "policies": policies,
            "sessions": sessions,
            "rate_rps": None,
            "ttfp_ms": {"n": 40, "p50": 700.0, "p90": p90_ms, "p95": None, "p99": None},
            "continuity": 1.0 if policies == "all" else 0.9,
            "viability": 0.995,
            "waste": waste,
            "turns_per_s": sessions / 10,
        }

    return {
        "benchmark": "voice_load",
        "workload": "W4, barge-in 0.5, false triggers 0.1",
        "device": "cpu: test, 2 cores",
        "git_commit": "0123456789abcdef",
        "date": "2026-11-22T10:00:00+00:00",
        "seed": 1,
        "points": [
            point("off", 16, 2000.0, 0.4),
            point("off", 4, 800.0, 0.3),
            point("off", 1, None, 0.3),
            point("all", 4, 760.0, 0.05),
            point("all", 16, 900.0, 0.06),
        ],
        "runs": [],
    }


@pytest.fixture
def kv_pressure() -> dict:
    def row(arm: str, repeat: int, recomputed: int, loaded: int, preloaded: int) -> dict:
        return {
            "arm": arm,
            "repeat": repeat,
            "ttft_all_ms": [20.0, 35.0, 180.0],
            "recomputed_tokens": recomputed,
            "tokens_loaded": loaded,
            "tokens_preloaded": preloaded,
            "loads": loaded / 100,
            "reload_s": loaded / 1e4,
        }

    return {
        "benchmark": "kv_pressure",
        "device": "cpu: test, 2 cores",
        "git_commit": "0123456789abcdef",
        "date": "2026-11-22T10:00:00+00:00",
        "config": {"sessions": 24, "link": "0.02:200"},
        "rows": [
            row("lru", 0, 0, 3000, 0),
            row("preload", 0, 10, 400, 2500),
            row("lru", 1, 0, 2600, 0),
        ],
    }


@pytest.fixture
def retention() -> dict:
    def ages(window: int) -> list[dict]:
        return [
            {
                "turn": n,
                "tokens_talked": 70 * n,
                "kv_tokens_per_call": min(70 * n, window),
                "turn_ms": 50.0 + n,
            }
            for n in (5, 10, 15)
        ]

    return {
        "benchmark": "retention",
        "config": {"calls": 4},
        "rows": [
            {"arm": "everything", "ages": ages(10_000)},
            {"arm": "bounded", "ages": ages(500)},
        ],
    }


@pytest.fixture
def collapse() -> dict:
    def run(arm: str, shares: list[float], saturated_s: float | None) -> dict:
        return {
            "arm": arm,
            "collapsed": saturated_s is not None,
            "pool": [{"at_s": 2.0 * n, "share": share} for n, share in enumerate(shares)],
            "latency_by_age_ms": [{"from_s": 10.0 * n, "p50": 20.0 + n} for n in range(3)],
            "saturated_s": saturated_s,
            "predicted_s": saturated_s and saturated_s + 1.5,
        }

    return {
        "benchmark": "collapse",
        "device": "cpu: test, 2 cores",
        "git_commit": "0123456789abcdef",
        "rows": [
            run("off", [0.1, 0.4, 0.8, 1.0], 6.0),
            run("off", [0.1, 0.5, 0.9, 1.0], 5.0),
            run("all", [0.1, 0.3, 0.3, 0.3], None),
        ],
    }


@pytest.fixture
def admission() -> dict:
    def open_system(arm: str) -> dict:
        trace = [
            {"at_s": float(n), "open": n, "limit": 16, "budget_share": 0.1 * n} for n in range(9)
        ]
        return {"arm": arm, "trace": trace}

    latency = {"p50": 20.0, "p90": 50.0, "p99": None}
    return {
        "benchmark": "admission",
        "device": "cpu: test, 2 cores",
        "n_star": 8,
        "ladder": [{"sessions": n, "latency_ms": latency} for n in (4, 8, 12)],
        "open_systems": [open_system("window"), open_system("unbounded")],
    }


@pytest.fixture
def written(tmp_path):
    """A function that writes a document and returns its path."""

    def write(document):
        path = tmp_path / "document.json"
        path.write_text(json.dumps(document))
        return path

    return write
