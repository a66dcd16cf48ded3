"""Server events checked against the types of OpenAI's own Python client."""

from typing import Any, get_args

from openai.types.realtime import RealtimeServerEvent

_MODELS = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(RealtimeServerEvent)[0])
    if hasattr(model, "model_fields")
}


def check(event: dict[str, Any]) -> None:
    """Raises if the client's strict parser would refuse this event, or not know it."""
    assert event["event_id"]
    _MODELS[event["type"]].model_validate(event)
