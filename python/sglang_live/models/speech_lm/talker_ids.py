"""The talker's prompt as token ids.

transformers gives the talker a prompt of summed embeddings. Here every prompt position is one id
that determines its embedding, so that SGLang's radix tree can compare ids. With V codec ids and T
text ids the id space is

    [0, V)            codec id                     (what the talker generates)
    TEXT  + t         text t                       TEXT  = V
    START + t         text t + codec_bos           START = V + T
    PAD   + c         tts_pad + codec id c         PAD   = V + 2T
    BOS               tts_bos + codec_pad          BOS   = 2V + 2T
    AUDIO + h         a thinker hidden state       AUDIO = BOS + 1, h = a hash of its content
    AUDIO + n         tts_pad + row n of a table of voices (voice_table.py), in a talker without
                      hidden states; behind them a hash of a speaker that the prompt brings along
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_live.models.speech_lm.voice_table import content_ids


@dataclass(frozen=True, slots=True)
class TalkerIds:
    codec_vocab: int
    text_vocab: int

    @property
    def text(self) -> int:
        return self.codec_vocab

    @property
    def start(self) -> int:
        return self.codec_vocab + self.text_vocab

    @property
    def pad(self) -> int:
        return self.codec_vocab + 2 * self.text_vocab

    @property
    def bos(self) -> int:
        return 2 * self.codec_vocab + 2 * self.text_vocab

    @property
    def audio(self) -> int:
        return self.bos + 1

    def user_segment(
        self, token_ids: list[int], placeholders: Collection[int], rows: np.ndarray | None
    ) -> list[int]:
        """Prompt ids of one user segment, `<|im_start|>user … <|im_end|>\\n`.

        Args:
            token_ids: the segment in the thinker's vocabulary, placeholders expanded.
            placeholders: ids of audio and of pictures.
            rows: [n_placeholders, thinker_hidden], the thinker's hidden states there.
        """
        n_places = sum(token in placeholders for token in token_ids)
        n_rows = 0 if rows is None else len(rows)
        if n_rows != n_places:
            raise ValueError(f"{n_places} placeholders, {n_rows} hidden states")
        keys = iter(self.state_keys(rows) if rows is not None and n_rows else ())
        return [next(keys) if t in placeholders else self.text + t for t in token_ids]

    def response_prefix(
        self, role: list[int], codes: list[int], first: int, voice: Sequence[int] = ()
    ) -> list[int]:
        """The prompt positions before the first codec frame of a response.

        Args:
            role: text ids of its beginning, `<|im_start|>assistant\\n`.
            codes: codec ids of language and speaker.
            first: the response's first text token.
            voice: ids of a table's rows, of a voice whose speaker has no code.
        """
        return [
            *(self.text + token for token in role),
            *(self.pad + code for code in codes),
            *voice,
            self.bos,
            self.start + first,
        ]

    def state_keys(self, rows: np.ndarray, n_voice_rows: int = 0) -> list[int]:
        """One key per row, of the whole clip's content (voice_table.py: content_ids).

        n_voice_rows: of a table of voices, whose ids are before the keys.
        """
        return content_ids(rows, self.audio + n_voice_rows)
