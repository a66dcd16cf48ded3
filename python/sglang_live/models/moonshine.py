"""Moonshine tiny through onnxruntime: encoder, and greedy decoding with a KV cache.

In: int16 at 16 kHz. Out: text with capitals and punctuation. The weights are those of the package
moonshine-voice (models/packages.py), whose own library is not used.
Source: Moonshine, arXiv:2410.15608.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.speech import Pcm
from sglang_live.models.utterances import unlooped, utterances

# <unk>, <s>, </s> and <<ST_0>> to <<ST_767>>, which mark nothing that is said.
_SPECIAL = re.compile(rb"<unk>|</?s>|<<ST_\d+>>")
_SPACE = "▁".encode()


class Vocabulary:
    """Pieces of text by token id; special tokens are empty."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [b"" if _SPECIAL.fullmatch(piece) else piece for piece in pieces]

    def __len__(self) -> int:
        return len(self._pieces)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read tokenizer.bin: for each token its length and its bytes.

        A length is one byte below 128, or two: its low seven bits plus 128, and its high bits.

        Raises:
            BadInputError: the file is cut.
        """
        data = path.read_bytes()
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            length = data[at]
            at += 1
            if length >= 128:
                length += 128 * data[at] - 128 if at < len(data) else 0
                at += 1
            pieces.append(data[at : at + length])
            at += length
        if at > len(data):
            raise BadInputError(f"{path} is cut: delete its directory, so that it is fetched again")
        return cls(pieces)

    def text(self, ids: Iterable[int]) -> str:
        """The tokens' text, without spaces at its ends.

        A character that was cut by the limit of tokens is left out.
        """
        joined = b"".join(self._pieces[token] for token in ids).replace(_SPACE, b" ")
        return " ".join(joined.decode(errors="ignore").split())


ASSETS = Path("moonshine_voice/assets/tiny-en")

# Shorter audio holds no word, and the encoder's convolutions need 0.06 s.
MIN_S = 0.1
# Silence added at both ends. Without it the model completes sentences that end with the audio: 14
# errors in the 232 words of 15 recordings instead of 4.
MARGIN_S = 0.3
# The model hallucinates repetitions otherwise; the rate is that of its authors.
MAX_TOKENS_PER_S = 6.5
_START, _END = 1, 2

_N_HEADS, _HEAD_DIM = 8, 36

Floats = npt.NDArray[np.float32]


class MoonshineRecogniser:
    """One per process; a Recogniser (models/speech.py). Its sessions may run in several threads."""

    def __init__(self, encoder: Any, decoder: Any, vocabulary: Vocabulary) -> None:
        """encoder, decoder: onnxruntime sessions."""
        self._encoder = encoder
        self._decoder = decoder
        self._vocabulary = vocabulary
        names = [given.name for given in decoder.get_inputs()]
        self._past_names = [name for name in names if name.startswith("past_key_values.")]
        self._outputs = [
            "logits",
            *(name.replace("past_key_values", "present") for name in self._past_names),
        ]

    @classmethod
    def load(cls, directory: Path, *, n_threads: int = 1) -> Self:
        """Load the files of the fetched package.

        Args:
            directory: as returned by `fetch(MOONSHINE)`.
            n_threads: of onnxruntime, for one call.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n_threads
        options.inter_op_num_threads = 1
        # The weights are int8: see SmartTurnModel in interaction/endpoint.py.
        options.add_session_config_entry("session.x64quantprecision", "1")
        encoder, decoder = (
            onnxruntime.InferenceSession(
                str(directory / ASSETS / name), options, providers=["CPUExecutionProvider"]
            )
            for name in ("encoder_model.ort", "decoder_model_merged.ort")
        )
        vocabulary = Vocabulary.load(directory / ASSETS / "tokenizer.bin")
        return cls(encoder, decoder, vocabulary)

    def transcribe(self, pcm: Pcm) -> str:
        """Recognise speech of any length; longer audio is cut where it is quietest.

        Args:
            pcm: [n] int16, mono, at INPUT_RATE_HZ.
        Returns:
            The text; "" for audio shorter than MIN_S and for zeros.
        """
        texts = [self._transcribe_piece(piece) for piece in utterances(pcm)]
        return " ".join(text for text in texts if text)

    def _transcribe_piece(self, pcm: Pcm) -> str:
        duration_s = len(pcm) / INPUT_RATE_HZ
        # In digital silence the model hears "You".
        if duration_s < MIN_S or not pcm.any():
            return ""
        wave = np.pad(pcm, int(MARGIN_S * INPUT_RATE_HZ)).astype(np.float32)[None] / 32768
        # The decoder shortens this mask itself, so it has the length of the audio.
        mask = np.ones(wave.shape, np.int64)
        [states] = self._encoder.run(None, {"input_values": wave, "attention_mask": mask})
        max_tokens = int(duration_s * MAX_TOKENS_PER_S) + 1
        return self._vocabulary.text(self._decode(states, mask, max_tokens))

    def _decode(self, states: Floats, mask: npt.NDArray[np.int64], max_tokens: int) -> list[int]:
        """Token ids of one piece, without the end.

        Args:
            states: [1, n_frames, 288], of the encoder.
            mask: [1, n_samples] of ones.
        """
        empty = np.zeros((1, _N_HEADS, 0, _HEAD_DIM), np.float32)
        past = dict.fromkeys(self._past_names, empty)
        ids: list[int] = []
        while len(ids) < max_tokens:
            inputs = {
                "input_ids": np.array([[ids[-1] if ids else _START]], np.int64),
                "encoder_hidden_states": states,
                "encoder_attention_mask": mask,
                "use_cache_branch": np.array([bool(ids)]),
                **past,
            }
            logits, *present = self._decoder.run(self._outputs, inputs)
            for name, values in zip(self._past_names, present, strict=True):
                # Only the first step computes the encoder's keys and values.
                if not ids or ".decoder." in name:
                    past[name] = values
            token = int(logits[0, -1].argmax())
            if token == _END:
                break
            ids.append(token)
        # A text that ends before its limit is said, also where it repeats itself.
        return unlooped(ids) if len(ids) == max_tokens else ids
