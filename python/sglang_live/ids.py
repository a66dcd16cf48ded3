"""Ids of the protocol's objects, jobs, engine sessions and engine requests: all are made here.

Each holds the id that it belongs to, so that one search in all logs finds a session:
session id -> turn id (orchestrator) -> job id -> request id; session id -> engine session.
The engine's policies read a request's kind from its id.
"""

import uuid
from itertools import count
from secrets import token_hex

# Id prefix of the talker's requests; they stay in the queue until their TalkerPrompt has come.
SPEAK_PREFIX = "speak-"
# The same, of speech that is not heard while it is made; in the thinker, responses of such turns.
FLEX_PREFIX = "flex-"
SPEECH_PREFIXES = (SPEAK_PREFIX, FLEX_PREFIX)
# Id prefix of the thinker's requests whose delay is audible: responses that a talker speaks, those
# with a deadline, and the prefills before them.
THINK_PREFIX = "think-"
# Id prefix of turn prefill: the user still speaks, so no consumer waits for these requests yet.
TURN_PREFILL_PREFIX = "prefill-"
# Requests that are heard, or lead to a response that is.
HEARD_PREFIXES = (SPEAK_PREFIX, THINK_PREFIX, TURN_PREFILL_PREFIX)

# Id prefix of best-effort requests (service tier `flex`, batches): they get what listeners do not
# need. The gateway alone gives such ids, so a client cannot claim or avoid the class. With
# `batch-byN-`, N is the time at which the request's batch expires, in seconds since 1970.
BATCH_PREFIX = "batch-"
# Request ids of other replies in writing begin so.
TEXT_PREFIX = "text-"
# Those of a warm-up hold it.
WARM_UP = "warm-up"
# Parts of job ids: what a turn does in each stage.
THINK = "think"
SPEAK = "speak"
VOICE = "voice"
FRAME = "frame"  # instead of THINK
# Job ids of frame mode end so, and request ids hold it.
FRAME_MARK = f"-{FRAME}"

# OpenAI's ids are at most 32 characters; some clients keep them in fields of that width.
_RANDOM_BYTES = 10

_numbers = count(1)


def _number() -> str:
    # Unique in this process, and all of one length: SGLang aborts requests by the beginning of
    # their ids, so that none may begin with another.
    return f"{next(_numbers):010}"


def new_id(prefix: str) -> str:
    """Of an object of the protocol. prefix: "event", "item", "resp", "sess", "conv" or "key"."""
    return f"{prefix}_{token_hex(_RANDOM_BYTES)}"


def new_engine_session(session_id: str) -> str:
    """Name of a new session inside an engine."""
    return f"{session_id}-kv{_number()}"


def new_rid(prefix: str, owner: str) -> str:
    """Id of a new request to an engine.

    Args:
        prefix: the kind of request, for the engine's policies.
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


def is_best_effort(rid: str) -> bool:
    """Whether a request is best-effort work: its id tells, SGLang's `priority` is not read."""
    return rid.startswith((BATCH_PREFIX, FLEX_PREFIX))


def is_logged(rid: str) -> bool:
    """Whether a request has lines of its own in the log: one of a user's turn, not of a frame."""
    ours = (*SPEECH_PREFIXES, THINK_PREFIX, TURN_PREFILL_PREFIX, TEXT_PREFIX)
    return rid.startswith(ours) and FRAME_MARK not in rid and WARM_UP not in rid
