"""Tiny networks with random weights, and the inputs and outputs of Kokoro's and Piper's exports.

Each id sounds for a fixed time, by a row of its own.
"""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KOKORO_IDS, KOKORO_SAMPLES = 178, 600
PIPER_RATE_HZ, PIPER_SAMPLES = 22_050, 256
_SIGNS = "abdefhijklmnoprstuvwzæðŋɑɔəɚɛɜɡɪɹɾʃʊʌʒˈˌːθ\u0308"
PIPER_ALPHABET = {"_": [0], "^": [1], "$": [2], " ": [3], ",": [4], ".": [5], "?": [6]} | {
    sign: [7 + number] for number, sign in enumerate(_SIGNS)
}


def kokoro_rows() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.1, (KOKORO_IDS, KOKORO_SAMPLES)).astype(np.float32)


def kokoro_durations() -> np.ndarray:
    return np.random.default_rng(2).uniform(0.5, 4.0, KOKORO_IDS).astype(np.float32)


def kokoro_styles(seed: int, n: int = 510) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, (n, 1, 256)).astype(np.float32)


def kokoro_wave(ids: list[int], style: np.ndarray) -> np.ndarray:
    return (kokoro_rows()[ids] * (1 + style.sum())).reshape(-1)


def write_kokoro(
    path: Path, *, ids: str = "input_ids", speed: int = TensorProto.FLOAT, durations: bool = False
) -> Path:
    nodes = [
        helper.make_node("Gather", ["rows", ids], ["sounds"]),
        helper.make_node("ReduceSum", ["style"], ["sum"], keepdims=0),
        helper.make_node("Add", ["sum", "one"], ["level"]),
        helper.make_node("Mul", ["sounds", "level"], ["levelled"]),
        helper.make_node("Cast", ["speed"], ["fast"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["levelled", "fast"], ["paced"]),
        helper.make_node("Reshape", ["paced", "flat"], ["waveform"]),
    ]
    outputs = [helper.make_tensor_value_info("waveform", TensorProto.FLOAT, [1, None])]
    if durations:
        nodes.append(helper.make_node("Gather", ["times", ids], ["durations"]))
        # Before the sound, as in one of the published exports.
        outputs.insert(0, helper.make_tensor_value_info("durations", TensorProto.FLOAT, [1, None]))
    constants = {
        "rows": kokoro_rows(),
        "times": kokoro_durations(),
        "one": np.ones((), np.float32),
        "flat": np.array([1, -1], np.int64),
    }
    inputs = [
        helper.make_tensor_value_info(ids, TensorProto.INT64, [1, None]),
        helper.make_tensor_value_info("style", TensorProto.FLOAT, [1, 256]),
        helper.make_tensor_value_info("speed", speed, [1]),
    ]
    return _write(path, nodes, inputs, outputs, constants)


def piper_rows() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 0.1, (100, PIPER_SAMPLES)).astype(np.float32)


def piper_wave(ids: list[int], length: float, speaker: int) -> np.ndarray:
    return (piper_rows()[ids] * length + speaker / 10).reshape(-1)


def write_piper(
    path: Path,
    *,
    language: str = "en-us",
    phonemes: str = "espeak",
    speakers: dict[str, int] | None = None,
    durations: bool = False,
) -> Path:
    nodes = [
        helper.make_node("Gather", ["rows", "input"], ["sounds"]),
        helper.make_node("Gather", ["scales", "second"], ["length"]),
        helper.make_node("Mul", ["sounds", "length"], ["paced"]),
    ]
    inputs = [
        helper.make_tensor_value_info("input", TensorProto.INT64, [None, None]),
        helper.make_tensor_value_info("input_lengths", TensorProto.INT64, [None]),
        helper.make_tensor_value_info("scales", TensorProto.FLOAT, [3]),
    ]
    last = "paced"
    if speakers:
        inputs.append(helper.make_tensor_value_info("sid", TensorProto.INT64, [None]))
        nodes += [
            helper.make_node("Cast", ["sid"], ["number"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["number", "ten"], ["offset"]),
            helper.make_node("Add", ["paced", "offset"], ["spoken"]),
        ]
        last = "spoken"
    nodes.append(helper.make_node("Reshape", [last, "flat"], ["output"]))
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 1, 1, None])]
    if durations:
        nodes.append(helper.make_node("Cast", ["input"], ["w_ceil"], to=TensorProto.FLOAT))
        outputs.append(helper.make_tensor_value_info("w_ceil", TensorProto.FLOAT, [None, None]))
    constants = {
        "rows": piper_rows(),
        "second": np.array(1, np.int64),
        "ten": np.array(10, np.float32),
        "flat": np.array([1, 1, 1, -1], np.int64),
    }
    config = {
        "audio": {"sample_rate": PIPER_RATE_HZ},
        "espeak": {"voice": language},
        "phoneme_type": phonemes,
        "phoneme_id_map": PIPER_ALPHABET,
        "inference": {"noise_scale": 0.3, "length_scale": 1.25, "noise_w": 0.4},
        "num_speakers": len(speakers or {"": 0}),
        "speaker_id_map": speakers or {},
        "dataset": "tiny",
    }
    Path(f"{path}.json").write_text(json.dumps(config))
    return _write(path, nodes, inputs, outputs, constants)


def _write(path: Path, nodes, inputs, outputs, constants) -> Path:
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path
