"""Ids of jobs, engine sessions and engine requests: every one is made here.

Each holds the id that it belongs to, so that one search in all logs finds a session:
session id -> turn id (orchestrator) -> job id -> request id; session id -> engine session.
"""

import uuid
from itertools import count

from sglang_live.engine_channel.messages import FRAME_MARK

# Parts of job ids: what a turn does in each stage.
THINK, SPEAK, VOICE, FRAME = "think", "speak", "voice", FRAME_MARK.removeprefix("-")

_numbers = count(1)


def _number() -> str:
    # Unique in this process, and all of one length: SGLang aborts requests by the beginning of
    # their ids, so that none may begin with another.
    return f"{next(_numbers):010}"


def new_engine_session(session_id: str) -> str:
    """Name of a new session inside an engine."""
    return f"{session_id}-kv{_number()}"


def new_rid(prefix: str, owner: str) -> str:
    """Id of a new request to an engine.

    Args:
        prefix: the kind of request, for the engine's policies (engine_channel/messages.py).
        owner: id of the job, or of the engine session, that the request belongs to.
    """
    return f"{prefix}{owner}-{_number()}"


def job_of(turn_id: str, part: str) -> str:
    """Id of the job that a turn has in one stage."""
    return f"{turn_id}-{part}"


def turn_of(job_id: str) -> str:
    """The turn of a job, from its id."""
    return job_id.rpartition("-")[0]


def new_job(what: str) -> str:
    """Id of a job that belongs to no turn."""
    return f"{what}-{uuid.uuid4().hex}"
