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

With `stream=True` the sound comes from `sound_iter(state, "answer")` while it is made. `sgl.gen`
works as ever, also after `listen`; `sgl.select` does not.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import openai
import soundfile as sf
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglGen, SglImage, SglSamplingParams

from sglang_live.errors import BadInputError
from sglang_live.sound.decoder import MAX_CLIP_S, Limits, decode_samples

INPUT_RATE_HZ = 16_000
OUTPUT_RATE_HZ = 24_000

# Rides on the field for constrained types, which the interpreter passes on as it stands.
_SPOKEN = "speech"
_SOUND = "sound"
# How often a listener looks whether the program has ended without another sound.
_LOOK_S = 0.1


def listen(clip: str | Path | np.ndarray, rate_hz: int | None = None) -> SglImage:
    """What the user says, within `sgl.user`. Written words of the same message come before it.

    Args:
        clip: an audio file, or mono samples: int16, or float in [-1, 1].
        rate_hz: of samples.
    Raises:
        ValueError: no audio file, or samples without a rate.
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
    # The interpreter knows of pictures and keeps their bytes; what they are is for us to see.
    return SglImage(file.getvalue())


def speak(
    name: str,
    voice: str | None = None,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
) -> SglGen:
    """An answer in text and sound, right at the beginning of `sgl.assistant`.

    Args:
        name: of the text in the state; `sound_of` has the sound.
        voice: of the model; by default its first.
        max_new_tokens, temperature: as for `sgl.gen`, whose other settings speech does not have.
    """
    return SglGen(
        name,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        dtype=f"{_SPOKEN}/{voice or ''}/{name}",
    )


def sound_of(state: ProgramState, name: str) -> np.ndarray:
    """int16 mono at OUTPUT_RATE_HZ; waits until it is complete.

    Raises:
        KeyError: nothing of that name was spoken.
    """
    info = state.get_meta_info(name)
    if not info or _SOUND not in info:
        raise KeyError(f"nothing was spoken under {name!r}")
    return np.frombuffer(bytes(info[_SOUND]), "<i2")


def sound_iter(state: ProgramState, name: str) -> Iterator[np.ndarray]:
    """Pieces of int16 mono at OUTPUT_RATE_HZ as they are made, of a program run with `stream`.

    Raises:
        KeyError: the program has ended, and nothing of that name was spoken.
        Exception: whatever ended the program before all of it was spoken.
    """
    executor = state.stream_executor
    pieces = _sounds(executor, name)
    while True:
        is_over = executor.is_finished  # seen first: what it spoke before is there by then
        try:
            pcm = pieces.get(timeout=0 if is_over else _LOOK_S)
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
    """A running sglang_live server.

    Args:
        base_url: such as `http://127.0.0.1:30000`.
    Raises:
        openai.APIError: nobody answers there, or the key is wrong.
    """

    is_chat_model = True

    def __init__(self, base_url: str, api_key: str | None = None):
        super().__init__()
        self._client = openai.OpenAI(
            base_url=f"{base_url.rstrip('/')}/v1", api_key=api_key or "none", max_retries=0
        )
        self._model = next(iter(self._client.models.list())).id
        # Only the program's own text uses it; the server has the model's template.
        self.chat_template = replace(get_chat_template("chatml"), image_token="", stop_str=())
        self._opening, _ = self.chat_template.get_prefix_and_suffix("assistant", [])

    def get_model_name(self) -> str:
        return self._model

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        pieces = list(self.generate_stream(s, sampling_params))
        return "".join(text for text, _ in pieces), pieces[-1][1] if pieces else {}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Text in pieces, each with what is known so far: `sound`, `finish_reason`."""
        if not s.text_.endswith(self._opening):
            raise ValueError(
                "sgl.gen and speak must come first within sgl.assistant: "
                "the model goes on with nobody's words but its own"
            )
        asked = {
            "model": self._model,
            "messages": [_as_heard(message) for message in s.messages_],
            "max_completion_tokens": sampling_params.max_new_tokens,
            "temperature": sampling_params.temperature,
            "stream": True,
        }
        kind, _, rest = (sampling_params.dtype or "").partition("/")
        if kind == _SPOKEN:
            voice, _, name = rest.partition("/")
            return self._spoken(asked, voice, _sounds(s, name))
        if kind:
            raise ValueError(f"a constrained type ({kind}) is not supported over audio")
        return self._written(asked, sampling_params)

    def select(self, s, choices, temperature, choices_method=None):
        raise NotImplementedError("sgl.select compares texts; ask with sgl.gen and compare")

    def _spoken(
        self, asked: dict[str, Any], voice: str, sounds: SimpleQueue
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        # OpenAI's types want a voice; one that the model does not have is its first.
        audio = {"format": "pcm16", "voice": voice or "default"}
        asked |= {"modalities": ["text", "audio"], "audio": audio}
        sound, info = bytearray(), {}
        for choice in self._choices(asked):
            # Not among the SDK's types of a delta, but in its data.
            made = getattr(choice.delta, "audio", None) or {}
            if data := made.get("data"):
                pcm = base64.b64decode(data)
                sound += pcm
                sounds.put(pcm)
            info = {_SOUND: sound, "finish_reason": choice.finish_reason}
            yield made.get("transcript") or "", info
        sounds.put(None)  # all of it; after a failure the listener sees the program's end

    def _written(
        self, asked: dict[str, Any], sampling: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        stop = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop)
        asked |= {"top_p": sampling.top_p, "stop": stop or None}
        for choice in self._choices(asked):
            yield choice.delta.content or "", {"finish_reason": choice.finish_reason}

    def _choices(self, asked: dict[str, Any]) -> Iterator[Any]:
        with self._client.chat.completions.create(**asked) as chunks:
            for chunk in chunks:
                yield from chunk.choices


def _sounds(executor: StreamExecutor, name: str) -> SimpleQueue:
    """Where pieces of the sound go, and None after the last; whoever comes first makes it."""
    by_name = executor.__dict__.setdefault("sounds_", {})
    return by_name.setdefault(name, SimpleQueue())


def _as_heard(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the interpreter, its sounds called by their name."""
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
            raise ValueError("pictures are not supported here, only sound")
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return {**message, "content": parts}
