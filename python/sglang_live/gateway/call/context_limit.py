"""Check that refuses input too long for the model's context when it arrives, before any turn.

In: items, instructions and functions. Out: ClientEventError with the longest length that fits.
The thinker measures them with its own tokenizer and limits, except texts so short that they always
fit. An input that fits alone may still be too long together with the conversation; then its turn
fails.
"""

import logging
from dataclasses import dataclass

from sglang_live.core import PromptContent, PromptSize
from sglang_live.errors import ContextLengthError, LiveError
from sglang_live.gateway.call.conversation.items import Item
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.tools import tools_of
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Length checks. Each raises ClientEventError with code context_length_exceeded."""

    orchestrator: Orchestrator
    metrics: GatewayMetrics

    async def check_settings(
        self, config: SessionConfig, before: SessionConfig, path: str, *, changes_tools: bool
    ) -> None:
        """Check instructions and functions, unless both are as before.

        Args:
            path: place of the settings in the event.
            changes_tools: whether the event has functions.
        """
        if (config.instructions, config.tools) == (before.instructions, before.tools):
            return
        # "auto", because every response may change the choice.
        functions = tools_of(config.tools, "auto").functions
        await self.check(
            PromptContent(instructions=config.instructions), header_at=f"{path}.instructions"
        )
        at = "tools" if changes_tools else "instructions"
        content = PromptContent(instructions=config.instructions, functions=functions)
        await self.check(content, header_at=f"{path}.{at}")

    async def check_item(self, item: Item, path: str) -> None:
        """path: place of its content in the event."""
        if (history := item.history()) is not None:
            await self.check(PromptContent.of([history]), items_at=path)

    async def check(
        self, content: PromptContent, *, header_at: str = "", items_at: str = ""
    ) -> None:
        """Check content of any kind.

        Args:
            header_at: path that an error names for instructions and functions; "": their length
                alone is not checked.
            items_at: path that an error names for messages; "": there are none.
        """
        try:
            size = await self.orchestrator.measure(content)
        except LiveError as error:
            # The content passes unchecked: if it is too long, its turn fails.
            self.metrics.prompts_unmeasured.inc()
            log.warning("prompt_unmeasured code=%s: %s", error.code, error)
            return
        if size is None:
            return
        if header_at and size.header > size.most_header:
            raise _too_long(_header_text(content, size), header_at)
        if items_at and size.header + size.items > size.most:
            raise _too_long(_items_text(content, size), items_at)


def _too_long(text: str, path: str) -> ClientEventError:
    return ClientEventError(text, code=ContextLengthError.code, param=path)


def _header_text(content: PromptContent, size: PromptSize) -> str:
    n_characters = len(content.instructions) + sum(map(len, content.functions))
    most = int(n_characters * size.most_header / size.header)
    return (
        f"Instructions and tools are {n_characters} characters long, {size.header} tokens. At most "
        f"{size.most_header} tokens fit into the model's context: about {most} such characters."
    )


def _items_text(content: PromptContent, size: PromptSize) -> str:
    left = max(0, size.most - size.header)
    share, audio_s = left / size.items, sum(content.clips_s)
    is_long, may_be = [], []
    if content.n_characters:
        is_long.append(f"{content.n_characters} characters")
        may_be.append(f"{int(content.n_characters * share)} such characters")
    if audio_s:
        is_long.append(f"{audio_s:.0f} s of audio")
        may_be.append(f"{int(audio_s * share)} s of audio")
    for name, n in (("picture", len(content.pictures)), ("video", len(content.videos))):
        if n:
            is_long.append(f"{n} {name}{'s' * (n > 1)}")
    if content.pictures or content.videos:
        may_be.append(f"{content.picture_tokens * share / 1000:.1f} megapixels")
    return (
        f"This is {' and '.join(is_long)} long, {size.items} tokens. At most {left} tokens fit "
        f"into the model's context: about {' and '.join(may_be)}."
    )
