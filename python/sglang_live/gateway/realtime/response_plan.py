"""What a response is created with: the session's settings, and those of response.create over them.

In: ResponseForm, SessionConfig. Out: ResponsePlan, or ClientEventError.
"""

from dataclasses import replace

from msgspec import UNSET

from sglang_live.core import PromptContent
from sglang_live.gateway.call.context_limit import ContextLimit
from sglang_live.gateway.call.conversation.conversation import Conversation
from sglang_live.gateway.call.conversation.items import Item
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.realtime.events import ItemReference, ResponseForm
from sglang_live.gateway.realtime.item_schema import Input, build_item, place_in
from sglang_live.gateway.realtime.session_config import (
    check_voice,
    common_changes,
    output_changes,
    with_choice,
)
from sglang_live.gateway.tools import tools_of

_MAX_METADATA_KEYS = 16
_MAX_METADATA_KEY, _MAX_METADATA_VALUE = 64, 512


async def plan_response(
    form: ResponseForm | None,
    config: SessionConfig,
    conversation: Conversation,
    *,
    given: Input,
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
        context=await _context(form, conversation, given),
        instructed=form.instructions not in (None, UNSET),
        in_conversation=form.conversation != "none",
        metadata=form.metadata,
    )


async def check_length(
    limit: ContextLimit, plan: ResponsePlan, form: ResponseForm, before: SessionConfig
) -> None:
    """Check the settings and input of a response.create.

    Args:
        before: the session's settings.
    Raises:
        ClientEventError: they are too long for the model's context.
    """
    has_tools = form.tools is not UNSET
    await limit.check_settings(plan.config, before, "response", changes_tools=has_tools)
    if plan.context is None:
        return
    for n, (item, entry) in enumerate(zip(plan.context, form.input or (), strict=True)):
        await limit.check_item(item, f"response.input[{n}]{place_in(entry)}")
    history = [seen for item in plan.context if (seen := item.history())]
    functions = tools_of(plan.config.tools, plan.config.tool_choice).functions
    content = PromptContent.of(history, plan.config.instructions, functions)
    await limit.check(content, items_at="response.input")


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


async def _context(
    form: ResponseForm, conversation: Conversation, given: Input
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
            items.append(await build_item(entry, given, path=path, call_ids=call_ids))
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
