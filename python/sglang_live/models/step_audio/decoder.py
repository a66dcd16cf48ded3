"""Step-Audio 2's decoder of codes, Token2wav: a flow with state, and HiFT.

In: frames of a code of 40 ms. Out: samples at 24 kHz.
Owner: VocoderEngine holds one StepAudioStream per job and batches them through one decoder.
Source: stepfun-ai/Step-Audio2 (token2wav.py: stream), Apache-2.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.flow import AHEAD, CHUNK
from sglang_live.models.codecs.flow.cached import CachedFlow, CachedVoice, FlowChunk, FlowState
from sglang_live.models.codecs.flow.cached_dit import KEPT_COLUMNS
from sglang_live.models.codecs.flow.decoder import (
    VOICE_PARTS,
    voice_parts,
)
from sglang_live.models.codecs.flow.encoder import UPSAMPLING
from sglang_live.models.codecs.hift import Hift, HiftState, hift_of
from sglang_live.models.speech_lm.frame_decoder import check_codes
from sglang_live.models.step_audio.family import DECODER, FLOW_FILE, HIFT_FILE, VOICES_FILE
from sglang_live.models.torch_files import read_torch_file
from sglang_live.policy.chunks import ChunkRule


@dataclass(slots=True, eq=False)
class StepAudioStream:
    """The state of one stream. Dropping it frees everything but its voice's, which others share.

    Attributes:
        rule: see VoiceStream.
        waiting: [n] int64 on the CPU, codes that came, and have no sound before the next ones.
    """

    voice: CachedVoice
    flow: FlowState
    rule: ChunkRule
    waiting: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sound: HiftState = field(default_factory=HiftState)

    @property
    def n_frames(self) -> int:
        """Those that are kept, however long the stream is."""
        return (self.voice.n_columns + KEPT_COLUMNS) // UPSAMPLING


class StepAudioDecoder:
    """A VoiceDecoder. Not thread-safe per stream, safe across streams.

    Attributes:
        voices, n_quantizers, n_tail_frames: see VoiceDecoder.
    """

    n_quantizers = n_tail_frames = 1
    has_flow = True

    def __init__(self, flow: CachedFlow, hift: Hift, voices: Mapping[str, CachedVoice]):
        self._flow, self._hift, self._voices = flow, hift, voices
        self.voices = tuple(voices)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str,
        dtype: torch.dtype,
        flow_dtype: torch.dtype | None = None,
    ) -> "StepAudioDecoder":
        """Load a checkpoint's folder token2wav, with flow.pt, hift.pt and spk2info.pt.

        Args:
            flow_dtype: see FlowDecoder.
        Raises:
            BadInputError: a file is missing or cannot be read, or lacks something.
        """
        path, place = Path(path) / DECODER, torch.device(device)
        flow = CachedFlow(read_torch_file(path / FLOW_FILE), place, flow_dtype or dtype)
        hift = hift_of(read_torch_file(path / HIFT_FILE), place, dtype)
        file = path / VOICES_FILE
        voices = {}
        for name, known in read_torch_file(file).items():
            parts = voice_parts(flow.n_codes, known, VOICE_PARTS, 0, f"{file}: {name}")
            try:
                voices[name] = flow.voice(*parts)
            except BadInputError as error:
                raise BadInputError(f"{file}: {name}: {error}") from error
        if not voices:
            raise BadInputError(f"{file} has no voices")
        return cls(flow, hift, voices)

    def new_stream(self, voice: str) -> StepAudioStream:
        """Raises BadInputError if there is no such voice."""
        if voice not in self._voices:
            raise BadInputError(f"there is no voice {voice!r}; there are {', '.join(self.voices)}")
        known = self._voices[voice]
        rule = ChunkRule(first=CHUNK + AHEAD, second=CHUNK, most=CHUNK)
        return StepAudioStream(known, known.state, rule)

    def use_graphs(self, max_streams: int) -> None:
        """There are none: what a stream keeps has a length of its own, and is attended to alone."""

    def check_codes(self, codes: Tensor) -> None:
        """See frame_decoder.check_codes."""
        check_codes(codes, self.n_quantizers, self._flow.n_codes)

    @torch.inference_mode()
    def decode(self, streams: list[StepAudioStream], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decode the next chunk of several streams; their states change together or not at all.

        Args, Returns, Raises: as FlowDecoder.decode.
        """
        if len(codes) != len(streams) or len(set(streams)) != len(streams):
            raise ValueError(f"{len(codes)} chunks do not fit {len(streams)} different streams")
        ends = [bool(chunk[-1, 0] == END_CODE) for chunk in codes]
        said = [
            torch.cat((stream.waiting, chunk[: len(chunk) - is_end, 0]))
            for stream, chunk, is_end in zip(streams, codes, ends, strict=True)
        ]
        aheads = [0 if is_end else AHEAD for is_end in ends]
        waves = [torch.empty(0, device=self._flow.device)] * len(streams)
        # A stream may end without any code.
        if due := [i for i, known in enumerate(said) if len(known) > aheads[i]]:
            found = self._flow.mels(
                [FlowChunk(streams[i].voice, streams[i].flow, said[i], aheads[i]) for i in due]
            )
            sounds = self._hift.vocode(
                [streams[i].sound for i in due], [mel for mel, _ in found], [ends[i] for i in due]
            )
            for i, (_, flow), (wave, sound) in zip(due, found, sounds, strict=True):
                waves[i], streams[i].flow, streams[i].sound = wave, flow, sound
        for stream, known, ahead in zip(streams, said, aheads, strict=True):
            stream.waiting = known[len(known) - ahead :]
        return waves
