"""Form of a request for a spoken chat completion.

In: OpenAI's JSON. Out: ChatForm, or ClientEventError. Every parameter of OpenAI's API is listed:
it is honoured, refused with its name, or accepted because it changes no completion.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from sglang_live.gateway.chat.messages import Messages
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.http.body import read_json
from sglang_live.gateway.json_forms import ServiceTier, Strict, check_neutral
from sglang_live.gateway.realtime.events import Ignored, Name, VoiceRef, voice_name
from sglang_live.gateway.tools import check_choice, check_name, check_tools

Modality = Literal["text", "audio"]
_TEXT_ONLY: tuple[Modality, ...] = ("text",)
MAX_TOKENS = 4096
# Seeds become 64-bit numbers in a stage.
_MAX_SEED = (1 << 63) - 1

# Parameters without a meaning for speech, with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "store": (False,),
    "top_logprobs": (0,),
    "top_p": (1,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class AudioOptions(Strict):
    """voice: as in the realtime protocol; unknown names select the model's first voice."""

    voice: Name | VoiceRef | None = None
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] | None = None


class StreamOptions(Strict):
    """include_obfuscation: accepted, no effect (padding that hides the length of the text)."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class FunctionTool(Strict):
    """strict: accepted, no effect: arguments are always validated."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(Strict):
    name: str


class Choice(Strict):
    type: Literal["function"]
    function: ChosenFunction


class ChatForm(Strict):
    """
    metadata to user: accepted, no effect.
    frequency_penalty and the fields after it: only the values in _NEUTRAL are accepted.
    """

    messages: Messages
    modalities: list[Modality] | None = field(default_factory=lambda: list(_TEXT_ONLY))
    model: str | None = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-_MAX_SEED, le=_MAX_SEED)] | None = None
    n: Literal[1] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: ServiceTier | None = None
    user: Ignored = None
    frequency_penalty: Any = None
    function_call: Any = None
    functions: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    moderation: Any = None
    prediction: Any = None
    presence_penalty: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    stop: Any = None
    store: Any = None
    top_logprobs: Any = None
    top_p: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def wants_audio(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def format(self) -> str:
        named = self.audio.format if self.audio else None
        return named or ("pcm16" if self.stream else "wav")

    @property
    def voice(self) -> str | None:
        return voice_name(self.audio.voice) if self.audio else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    def functions_of(self) -> tuple[dict[str, Any], ...]:
        """The tools in the realtime protocol's form, which the rest of the gateway uses."""
        tools = (tool.function for tool in self.tools or ())
        return tuple(
            {"type": "function", "name": f.name}
            | ({"description": f.description} if f.description else {})
            | ({"parameters": f.parameters} if f.parameters else {})
            for f in tools
        )

    def choice(self) -> str | dict[str, Any]:
        """The tool_choice in the realtime protocol's form."""
        choice = self.tool_choice
        if isinstance(choice, Choice):
            return {"type": "function", "name": choice.function.name}
        return choice or "auto"


def read_chat(body: bytes) -> ChatForm:
    """Raises ClientEventError with the name of the faulty parameter."""
    form = read_json(body, ChatForm)
    for name, values in _NEUTRAL.items():
        check_neutral(getattr(form, name), values, name)
    _check_together(form)
    functions = form.functions_of()
    for n, function in enumerate(functions):
        check_name(function["name"], f"tools[{n}].function.name")
    check_tools(functions, path="tools", inner=".function")
    check_choice(functions, form.choice(), path="tool_choice")
    return form


def _check_together(form: ChatForm) -> None:
    """Raises ClientEventError if two parameters contradict each other."""
    if form.stream and form.format != "pcm16":
        raise ClientEventError("With 'stream' audio.format must be 'pcm16'.", param="audio.format")
    if form.stream_options and not form.stream:
        raise ClientEventError("'stream_options' needs 'stream'.", param="stream_options")
    if form.max_tokens and form.max_completion_tokens not in (None, form.max_tokens):
        raise ClientEventError(
            "'max_tokens' and 'max_completion_tokens' disagree.", param="max_tokens"
        )
    if form.tool_choice == "required" and not form.tools:
        raise ClientEventError("tool_choice: there are no 'tools'.", param="tool_choice")
