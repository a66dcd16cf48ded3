"""The one form of /v1/chat/completions, for spoken and written answers alike.

In: OpenAI's JSON, with SGLang's extensions. Out: ChatForm; of a written one, what SGLang gets.
Every parameter is honoured, refused with its name, or accepted because it changes no completion.
"""

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, field
from msgspec.structs import replace

from sglang_live.gateway.audio.files import check_format
from sglang_live.gateway.chat.messages import (
    AudioUrlPart,
    Message,
    Messages,
    SpokenAnswers,
    UrlPart,
    as_sglang,
    read_messages,
)
from sglang_live.gateway.errors import ClientEventError, ParameterError
from sglang_live.gateway.json_forms import Strict, check_neutral
from sglang_live.gateway.native import grammars
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.sampling import (
    IGNORED,
    NEUTRAL,
    Amount,
    CheckedBody,
    Name,
    OpenaiForm,
    TopLogprobs,
)
from sglang_live.gateway.realtime.events import VoiceRef, voice_name
from sglang_live.gateway.tools import check_choice, check_name, check_tools

_MOST_SPOKEN = {"n": 1, "max_tokens": 4096, "max_completion_tokens": 4096, "temperature": 2}
# What has an effect on a spoken answer, or none on any.
_SPOKEN = frozenset(
    (
        *("messages", "modalities", "model", "audio", "stream", "stream_options", "max_tokens"),
        *("max_completion_tokens", "temperature", "seed", "tools", "tool_choice"),
        *("parallel_tool_calls", "service_tier", "n", *IGNORED),
    )
)
# Values of the others that change no spoken answer.
_NEUTRAL_SPOKEN: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "enable_thinking": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "top_logprobs": (0,),
    "top_p": (1,),
}


class AudioOptions(Strict):
    """voice: as in the realtime protocol; unknown names select the model's first voice."""

    voice: Name | VoiceRef | None = None
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"] | None = None


class FunctionTool(Strict, omit_defaults=True):
    """strict: arguments of spoken answers are always validated."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: Annotated[str, Meta(max_length=65_536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, omit_defaults=True):
    function: FunctionTool
    type: Literal["function"] | None = None


class ChosenFunction(Strict):
    name: Name


class Choice(Strict, omit_defaults=True):
    function: ChosenFunction
    type: Literal["function"] | None = None


class TemplateOptions(Strict, omit_defaults=True):
    """Without `chat_template`: SGLang would run the client's template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


_Modality = Literal["text", "audio"]
_TEXT_ONLY: list[_Modality] = ["text"]
_Tools = Annotated[list[Tool], Meta(max_length=128)]
_ToolChoice = Literal["auto", "none", "required"] | Choice
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatForm(OpenaiForm, kw_only=True):
    messages: Messages
    modalities: list[_Modality] | None = field(default_factory=lambda: [*_TEXT_ONLY])
    audio: AudioOptions | None = None
    max_completion_tokens: Amount | None = None
    tools: _Tools | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: _Effort | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    enable_thinking: bool | None = None
    use_audio_in_video: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    rid: Annotated[str, Meta(min_length=1, max_length=512)] | None = None

    @property
    def wants_audio(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def format(self) -> str:
        named = self.audio.format if self.audio else None
        return named or ("pcm16" if self.stream else "wav")

    @property
    def is_in_qwens_form(self) -> bool:
        """A stream of PCM16 that is called wav, and words as content."""
        return bool(self.stream) and self.format == "wav"

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


class TokenizeForm(Strict, kw_only=True, omit_defaults=True):
    """Of /v1/tokenize: a prompt, or what a chat template makes one of."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    model: Name | None = None
    tools: _Tools | None = None
    tool_choice: _ToolChoice | None = None
    reasoning_effort: _Effort | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None


# --- spoken answers ---


def check_spoken(form: ChatForm) -> None:
    """Raises ClientEventError with the name of the faulty parameter."""
    for name in form.__struct_fields__:
        if name not in _SPOKEN:
            check_neutral(getattr(form, name), _NEUTRAL_SPOKEN.get(name, ()), name)
    if form.stream_options is not None:
        at = "stream_options.continuous_usage_stats"
        check_neutral(form.stream_options.continuous_usage_stats, (False,), at)
    for name, most in _MOST_SPOKEN.items():
        if (getattr(form, name) or 0) > most:
            raise ClientEventError(f"At most {most} in a spoken answer at '$.{name}'.", param=name)
    _check_together(form)
    functions = form.functions_of()
    for n, function in enumerate(functions):
        check_name(function["name"], f"tools[{n}].function.name")
    check_tools(functions, path="tools", inner=".function")
    check_choice(functions, form.choice(), path="tool_choice")


def _check_together(form: ChatForm) -> None:
    """Raises ClientEventError if two parameters contradict each other."""
    if form.stream and form.format not in ("pcm16", "wav"):
        raise ClientEventError(
            "With 'stream' audio.format must be 'pcm16', or 'wav' for Qwen's form.",
            param="audio.format",
        )
    check_format(form.format, "audio.format")
    if form.stream_options and not form.stream:
        raise ClientEventError("'stream_options' needs 'stream'.", param="stream_options")
    if form.max_tokens and form.max_completion_tokens not in (None, form.max_tokens):
        raise ClientEventError(
            "'max_tokens' and 'max_completion_tokens' disagree.", param="max_tokens"
        )
    if form.tool_choice == "required" and not form.tools:
        raise ClientEventError("tool_choice: there are no 'tools'.", param="tool_choice")


# --- written answers: what SGLang gets ---


def written(form: ChatForm, limits: NativeLimits, answers: SpokenAnswers) -> CheckedBody:
    """Raises ClientEventError: a parameter is wrong, or asks for a spoken answer."""
    if form.enable_thinking is not None:  # as Qwen's clients name it
        options = form.chat_template_kwargs or TemplateOptions()
        options = replace(options, enable_thinking=form.enable_thinking)
        form = replace(form, chat_template_kwargs=options, enable_thinking=None)
    if form.modalities not in (None, _TEXT_ONLY):
        raise ParameterError("modalities", 'must be ["text"] here.')
    check_neutral(form.audio, (), "audio")
    limits.check_tokens(form.max_completion_tokens, "max_completion_tokens")
    body = form.to_sglang(limits) | templated(form, limits, answers)
    body.pop("modalities", None)
    if form.limit is None and (form.n or 1) > 1:
        # Without a maximum each completion might be as long as the context.
        body["max_tokens"] = min(limits.context_tokens, limits.max_new_tokens // (form.n or 1))
    return form.counted(body, limits, most=form.limit or body.get("max_tokens") or 0)


def templated(
    form: ChatForm | TokenizeForm, limits: NativeLimits, answers: SpokenAnswers
) -> dict[str, Any]:
    """What reaches SGLang's chat template: messages, and the checks of what is beside them."""
    for n, tool in enumerate(form.tools or ()):
        if tool.function.parameters is not None:
            grammars.schema(tool.function.parameters, f"tools[{n}].function.parameters")
    options = form.chat_template_kwargs or TemplateOptions()
    for name, value, neutral, at in (
        ("reasoning_effort", form.reasoning_effort, "none", ""),
        ("enable_thinking", options.enable_thinking, False, "chat_template_kwargs."),
        ("thinking", options.thinking, False, "chat_template_kwargs."),
    ):
        if name not in limits.template_reads:
            check_neutral(value, (neutral,), at + name)
    takes = get_args(UrlPart) if limits.takes_images else (AudioUrlPart,)
    messages = read_messages(form.messages or [], answers, takes)
    if form.continue_final_message:
        _check_continued(messages)
    return {"messages": list(map(as_sglang, messages))} if messages else {}


def _check_continued(messages: list[Message]) -> None:
    """SGLang removes the last message and renders the others, even if there are none."""
    last = messages[-1] if len(messages) > 1 else Message(role="user")
    has_text = isinstance(last.content, str) and bool(last.content)
    if last.role != "assistant" or not has_text:
        raise ParameterError(
            "continue_final_message", "needs a last message of the assistant, and one before it."
        )
