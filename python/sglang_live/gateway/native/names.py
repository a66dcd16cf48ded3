"""Names of requests and sessions in the engine: each belongs to one owner.

SGLang aborts every request whose name begins with the one that is given, and gives a session to
every client that names it. Here no owner can write another owner's name.
"""

import re
from typing import Any
from uuid import uuid4

from sglang_live.gateway.owner import owned_digest

_PREFIX = "native-"
_OWN = re.compile(r"native-([0-9a-f]{12})[0-9a-f]{20}(_\d{1,6})?")
_TAG_CHARS = 12


def request_name(owner: str, name: str | None = None) -> str:
    """The engine's name of a request. name: as the client chose it, or had it from an answer."""
    tag = owned_digest("request tag", owner, "")[:_TAG_CHARS]
    known = name and _OWN.fullmatch(name)
    if known and known[1] == tag:
        return name
    chosen = owned_digest("request", owner, name) if name else uuid4().hex
    return f"{_PREFIX}{tag}{chosen[: 32 - _TAG_CHARS]}"


def session_name(owner: str, name: str) -> str:
    return _PREFIX + owned_digest("session", owner, name)


def put_names(body: dict[str, Any], owner: str) -> None:
    """Replace the client's names in a checked body; a request without one gets one."""
    rid = body.get("rid")
    if isinstance(rid, list):
        body["rid"] = [request_name(owner, one) for one in rid]
    else:
        body["rid"] = request_name(owner, rid)
    if session := body.get("session_params"):
        session["id"] = session_name(owner, session["id"])
        if "rid" in session:
            session["rid"] = request_name(owner, session["rid"])
