"""Tiny networks with the inputs and outputs of the ONNX files beside CosyVoice's checkpoints."""

from pathlib import Path

import numpy as np
import soundfile as sf
from onnx import TensorProto

from sglang_live.models.onnx_graph import Graph, ints

N_CODES, N_MELS, N_KALDI, WIDTH = 6561, 128, 80, 192
RECORDED, CLARA, CLARA_SAYS = 50_000, "clara", "I am Clara."
SCALE = 300.0


def write(path: Path, version: int) -> None:
    (path / f"speech_tokenizer_v{version}.onnx").write_bytes(s3())
    (path / "campplus.onnx").write_bytes(campplus())


def recordings(folder: Path) -> Path:
    """A directory with one recording, and its words."""
    sound = 0.2 * np.random.default_rng(3).standard_normal(RECORDED)
    sf.write(folder / f"{CLARA}.wav", sound, 24_000, subtype="FLOAT")
    (folder / f"{CLARA}.txt").write_text(f"{CLARA_SAYS}\n")
    return folder


def heard_weights() -> np.ndarray:
    """[1, N_MELS, 4]."""
    return np.random.default_rng(1).normal(0, 1, (1, N_MELS, 4)).astype(np.float32)


def speaker_weights() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 1, (N_KALDI, WIDTH)).astype(np.float32)


def s3() -> bytes:
    """A code for each four frames; without the number of all frames they are other ones."""
    graph = Graph()
    heard = graph.add("Conv", "feats", heard_weights(), strides=[4], pads=[0, 3])
    scaled = graph.add("Abs", graph.add("Mul", heard, np.array(SCALE, np.float32)))
    whole = graph.add("Cast", scaled, to=TensorProto.INT64)
    n_frames = graph.part(graph.add("Shape", "feats"), axis=0, begin=2, end=3)
    lacking = graph.add("Sub", n_frames, graph.add("Cast", "feats_length", to=TensorProto.INT64))
    codes = graph.add("Mod", graph.add("Add", whole, lacking), ints([N_CODES]))
    squeezed = graph.add("Squeeze", codes, ints([1]))
    graph.add("Cast", squeezed, to=TensorProto.INT32, name="indices")
    return graph.model(
        "s3",
        inputs={
            "feats": (TensorProto.FLOAT, (1, N_MELS, "n_frames")),
            "feats_length": (TensorProto.INT32, (1,)),
        },
        outputs={"indices": (TensorProto.INT32, (1, "n_codes"))},
    )


def campplus(width: int = WIDTH) -> bytes:
    graph = Graph()
    seen = graph.add("MatMul", "input", speaker_weights()[:, :width])
    graph.add("ReduceMax", seen, axes=[1], keepdims=0, name="output")
    return graph.model(
        "campplus",
        inputs={"input": (TensorProto.FLOAT, (1, "n_frames", N_KALDI))},
        outputs={"output": (TensorProto.FLOAT, (1, width))},
    )
