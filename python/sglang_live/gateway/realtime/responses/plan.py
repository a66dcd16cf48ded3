"""What a response is created with: the session's settings, and those of response.create over them.

In: ResponseForm, SessionConfig. Out: ResponsePlan, or ClientEventError.
"""

from dataclasses import dataclass, field, replace

from msgspec import UNSET

from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.realtime.conversation.conversation import Conversation
from sglang_live.gateway.realtime.conversation.item_schema import build_item
from sglang_live.gateway.realtime.conversation.items import Item
from sglang_live.gateway.realtime.events import ItemReference, ResponseForm
from sglang_live.gateway.realtime.session_config import (
    SessionConfig,
    check_voice,
    common_changes,
    output_changes,
    with_choice,
)
from sglang_live.ids import new_id

_MAX_METADATA_KEYS = 16
_MAX_METADATA_KEY, _MAX_METADATA_VALUE = 64, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """The settings and the context of one response.

    config: the session's settings with those of response.create over them.
    decided_at_s: when the user's turn was known to be over, on the gateway's clock.
    speech_end_at_s: when the user stopped speaking, on the same clock; None if no detected speech
        led to the response.
    context: items that replace the conversation in the prompt; None: the conversation.
    instructed: it has instructions of its own, so that it is made even after a turn without speech.
    in_conversation: its items join the conversation; False for an out-of-band response.
    """

    config: SessionConfig
    decided_at_s: float
    speech_end_at_s: float | None = None
    context: tuple[Item, ...] | None = None
    instructed: bool = False
    in_conversation: bool = True
    metadata: dict[str, str] | None = None
    response_id: str = field(default_factory=lambda: new_id("resp"))

    @property
    def stateless(self) -> bool:
        """Whether its turn uses no KV of the session, which holds the conversation only."""
        return not self.in_conversation or self.context is not None


def plan_response(
    form: ResponseForm | None,
    config: SessionConfig,
    conversation: Conversation,
    *,
    max_audio_bytes: int,
    now_s: float,
    voice_locked: bool = False,
) -> ResponsePlan:
    """Build the plan of a client's response.create.

    Args:
        form: None if the event has no settings.
        now_s: time on the gateway's clock.
        voice_locked: the session has sent audio, so that its voice cannot change any more.
    Raises:
        ClientEventError: a bad value, or a reference to an item that does not exist.
    """
    if form is None:
        return ResponsePlan(config=config, decided_at_s=now_s)
    if form.conversation not in (None, "auto", "none"):
        raise ClientEventError(
            f"Unknown conversation {form.conversation!r}: auto or none.",
            param="response.conversation",
        )
    _check_metadata(form.metadata or {})
    # Explicit nulls fall back to the session's values.
    changes = common_changes(form, config, path="response")
    if form.audio and form.audio.output:
        path = "response.audio.output"
        changes |= output_changes(form.audio.output, config, path=path)
        check_voice(changes, config, locked=voice_locked, path=path)
    config = with_choice(replace(config, **changes), form, path="response")
    return ResponsePlan(
        config=config,
        decided_at_s=now_s,
        context=_context(form, config, conversation, max_audio_bytes),
        instructed=form.instructions not in (None, UNSET),
        in_conversation=form.conversation != "none",
        metadata=form.metadata,
    )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_METADATA_KEYS:
        raise ClientEventError(
            f"At most {_MAX_METADATA_KEYS} metadata keys.", param="response.metadata"
        )
    if any(len(k) > _MAX_METADATA_KEY or len(v) > _MAX_METADATA_VALUE for k, v in metadata.items()):
        raise ClientEventError(
            f"Metadata keys have at most {_MAX_METADATA_KEY} characters, values "
            f"{_MAX_METADATA_VALUE}.",
            param="response.metadata",
        )


def _context(
    form: ResponseForm, config: SessionConfig, conversation: Conversation, max_audio_bytes: int
) -> tuple[Item, ...] | None:
    if form.input is None:
        return None
    items: list[Item] = []
    call_ids = dict.fromkeys(conversation.call_ids, False)  # an input is a history of its own
    for index, entry in enumerate(form.input):
        path = f"response.input[{index}]"
        if isinstance(entry, ItemReference):
            items.append(_referenced(entry, conversation, path))
        else:
            items.append(
                build_item(
                    entry,
                    config.input_format,
                    max_bytes=max_audio_bytes,
                    path=path,
                    call_ids=call_ids,
                )
            )
            if call_id := items[-1].call_id:
                call_ids[call_id] = False
            if answered := items[-1].answers:
                call_ids[answered] = True
    return tuple(items)


def _referenced(entry: ItemReference, conversation: Conversation, path: str) -> Item:
    if entry.id not in conversation:
        raise ClientEventError(
            f"The referenced item '{entry.id}' does not exist.", param=f"{path}.id"
        )
    return conversation.get(entry.id, action="retrieve")
