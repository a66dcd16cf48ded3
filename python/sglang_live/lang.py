"""SGLang frontend programs that speak and listen.

    import sglang as sgl
    from sglang_live.lang import LiveEndpoint, listen, sound_of, speak

    @sgl.function
    def ask(s, clip):
        s += sgl.system("Be brief.")
        s += sgl.user(listen(clip))
        s += sgl.assistant(speak("answer", voice="ethan"))

    clip = "python/sglang_live/assets/question.flac"
    state = ask.run(clip=clip, backend=LiveEndpoint("http://127.0.0.1:30000"))
    print(state["answer"])
    soundfile.write("answer.wav", sound_of(state, "answer"), OUTPUT_RATE_HZ)

With `stream=True`, `sound_iter(state, "answer")` yields the sound while it is generated. `sgl.gen`
works, also after `listen`; `sgl.select` is not supported.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np
import openai
import soundfile as sf
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglGen, SglImage, SglSamplingParams

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import MAX_CLIP_S, Limits, decode_samples

Sounds = SimpleQueue[bytes | None]

INPUT_RATE_HZ = 16_000
OUTPUT_RATE_HZ = 24_000

# Marks speech in the field for constrained types, which the interpreter passes on unchanged.
_SPOKEN = "speech"
_SOUND = "sound"
# Settings that every request has, or that are no settings of a request.
_SENT = {"max_new_tokens", "temperature", "top_p", "stop", "dtype"}
_WIRE_NAMES = {"min_new_tokens": "min_tokens"} | {
    name: name
    for name in (
        "stop_token_ids",
        "stop_regex",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "ignore_eos",
        "json_schema",
        "regex",
    )
}
# Period of the check whether the program has ended without more sound.
_POLL_S = 0.1


def listen(clip: str | Path | np.ndarray, rate_hz: int | None = None) -> SglImage:
    """Speech of the user, within `sgl.user`. Written text of the same message comes before it.

    Args:
        clip: an audio file, or mono samples: int16, or float in [-1, 1].
        rate_hz: rate of samples; None for a file.
    Raises:
        ValueError: the file is no audio file, or samples have no rate.
    """
    if isinstance(clip, np.ndarray):
        if rate_hz is None:
            raise ValueError("samples need their rate_hz")
        samples = clip
    else:
        rate_hz = INPUT_RATE_HZ
        try:
            samples = decode_samples(
                Path(clip).read_bytes(), rate_hz=rate_hz, limits=Limits(max_s=MAX_CLIP_S)
            )
        except (OSError, BadInputError) as error:
            raise ValueError(f"cannot read audio file {clip}: {error}") from error
    file = io.BytesIO()
    sf.write(file, samples, rate_hz, format="WAV", subtype="PCM_16")
    # The interpreter has no sounds, but passes the bytes of images on without a check.
    return SglImage(file.getvalue())


def speak(
    name: str,
    voice: str | None = None,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
) -> SglGen:
    """A response in text and sound; must be first within `sgl.assistant`.

    Args:
        name: name of the text in the state, and of the sound for `sound_of`.
        voice: a voice of the model; None: its first one.
        max_new_tokens, temperature: as for `sgl.gen`; its other settings do not apply to speech.
    """
    return SglGen(
        name,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=f"{_SPOKEN}/{voice or ''}/{name}",
    )


def sound_of(state: ProgramState, name: str) -> np.ndarray:
    """Wait for the complete sound; returns int16 mono at OUTPUT_RATE_HZ.

    Raises:
        KeyError: no speech has that name.
    """
    info = state.get_meta_info(name)
    if not info or _SOUND not in info:
        raise KeyError(f"nothing was spoken under {name!r}")
    return np.frombuffer(bytes(info[_SOUND]), "<i2")


def sound_iter(state: ProgramState, name: str) -> Iterator[np.ndarray]:
    """Iterate over chunks of int16 mono at OUTPUT_RATE_HZ of a program that runs with `stream`.

    Raises:
        KeyError: the program has ended, and no speech has that name.
        Exception: the error that ended the program before the end of the speech.
    """
    executor = state.stream_executor
    chunks = _sounds(executor, name)
    while True:
        # Read before the queue: afterwards the queue of a finished program is complete.
        is_over = executor.is_finished
        try:
            pcm = chunks.get(timeout=0 if is_over else _POLL_S)
        except Empty:
            if is_over:
                break
            continue
        if pcm is None:
            return
        yield np.frombuffer(pcm, "<i2")
    if executor.error_ is not None:
        raise executor.error_
    sound_of(state, name)


class LiveEndpoint(BaseBackend):
    """A running sglang_live server as a backend of SGLang's frontend.

    Args:
        base_url: such as `http://127.0.0.1:30000`.
    Raises:
        openai.APIError: no server responds there, or the key is wrong.
    """

    is_chat_model = True

    def __init__(self, base_url: str, api_key: str | None = None):
        super().__init__()
        self._client = openai.OpenAI(
            base_url=f"{base_url.rstrip('/')}/v1", api_key=api_key or "none", max_retries=0
        )
        self._model = next(iter(self._client.models.list())).id
        # For the text of the program state only; the server has the model's template.
        self.chat_template = replace(get_chat_template("chatml"), image_token="", stop_str=())
        self._opening, _ = self.chat_template.get_prefix_and_suffix("assistant", [])

    def get_model_name(self) -> str:
        return self._model

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        chunks = list(self.generate_stream(s, sampling_params))
        return "".join(text for text, _ in chunks), chunks[-1][1] if chunks else {}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Iterate over chunks of text, with `finish_reason` and, for speech, all `sound` so far."""
        if not s.text_.endswith(self._opening):
            raise ValueError(
                "sgl.gen and speak must come first within sgl.assistant: "
                "the model cannot continue text that the program wrote"
            )
        request = {
            "model": self._model,
            "messages": [_with_sounds(message) for message in s.messages_],
            "max_completion_tokens": sampling_params.max_new_tokens,
            "temperature": sampling_params.temperature,
            "stream": True,
        }
        kind, _, rest = (sampling_params.dtype or "").partition("/")
        if kind == _SPOKEN:
            voice, _, name = rest.partition("/")
            return self._spoken(request, voice, _sounds(s, name))
        if kind:
            raise ValueError(f"a constrained type ({kind}) is not supported over audio")
        return self._written(request, sampling_params)

    def select(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError("sgl.select is not supported: use sgl.gen and compare its text")

    def _spoken(
        self, request: dict[str, Any], voice: str, sounds: Sounds
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        # OpenAI's types require a voice; one of theirs means the model's first.
        audio = {"format": "pcm16", "voice": voice or "alloy"}
        request |= {"modalities": ["text", "audio"], "audio": audio}
        sound, info = bytearray(), {}
        for choice in self._choices(request):
            # The SDK's type of a delta has no audio, but its data has.
            audio_delta = getattr(choice.delta, "audio", None) or {}
            if data := audio_delta.get("data"):
                pcm = base64.b64decode(data)
                sound += pcm
                sounds.put(pcm)
            info = {_SOUND: sound, "finish_reason": choice.finish_reason}
            yield audio_delta.get("transcript") or "", info
        sounds.put(None)  # complete; after a failure sound_iter sees the end of the program

    def _written(
        self, request: dict[str, Any], sampling: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        stop = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop)
        request |= {"top_p": sampling.top_p, "stop": stop or None, "extra_body": _more(sampling)}
        for choice in self._choices(request):
            yield choice.delta.content or "", {"finish_reason": choice.finish_reason}

    def _choices(self, request: dict[str, Any]) -> Iterator[Any]:
        with self._client.chat.completions.create(**request) as chunks:
            for chunk in chunks:
                yield from chunk.choices


def _more(sampling: SglSamplingParams) -> dict[str, Any]:
    """Settings that a program has changed and OpenAI's SDK has no names for; the server refuses
    those that it does not take for these messages.
    """
    changed = {
        field.name: value
        for field in fields(sampling)
        if field.name not in _SENT and (value := getattr(sampling, field.name)) != field.default
    }
    if refused := sorted(changed.keys() - _WIRE_NAMES.keys()):
        raise ValueError(f"{', '.join(refused)}: not supported")
    body = {_WIRE_NAMES[name]: value for name, value in changed.items()}
    if (schema := body.pop("json_schema", None)) is not None:
        form = {"name": "schema", "schema": json.loads(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def _sounds(executor: StreamExecutor, name: str) -> Sounds:
    """The queue of a sound's chunks, with None after the last; made at the first use."""
    by_name: dict[str, Sounds] = executor.__dict__.setdefault("sounds_", {})
    return by_name.setdefault(name, SimpleQueue())


def _with_sounds(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the interpreter with its images sent as sounds."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = []
    for part in content:
        if part["type"] == "text":
            parts += [part] if part["text"] else []
            continue
        _, _, data = part["image_url"]["url"].partition("base64,")
        if base64.b64decode(data[:16])[8:12] != b"WAVE":
            raise ValueError("pictures are not supported, only sound")
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return {**message, "content": parts}
