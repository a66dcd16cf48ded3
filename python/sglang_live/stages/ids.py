"""Ids of engine sessions, engine requests and jobs: every one is made here."""

import uuid

# Parts of job ids: what a turn does in each stage.
THINK, SPEAK, VOICE = "think", "speak", "voice"


def new_engine_session() -> str:
    """Name of a new session inside an engine."""
    return f"live-{uuid.uuid4().hex}"


def new_rid(prefix: str = "") -> str:
    """Id of a new request to an engine. All of one prefix have the same length, because SGLang
    aborts every request whose id begins with the given one.

    Args:
        prefix: the kind of request, for the engine's policies (engine_channel/messages.py).
    """
    return prefix + uuid.uuid4().hex


def job_of(turn_id: str, part: str) -> str:
    """Id of the job that a turn has in one stage."""
    return f"{turn_id}-{part}"


def turn_of(job_id: str) -> str:
    """The turn of a job, from its id."""
    return job_id.rpartition("-")[0]


def new_job(what: str) -> str:
    """Id of a job that belongs to no turn."""
    return f"{what}-{uuid.uuid4().hex}"
