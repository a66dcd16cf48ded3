"""No code of the scheduler's thread waits for the device, apart from where results are due.

A new place fails here: move it to the host's copy of the values, copy with models/host_copy.py, or
list it with the reason why it does not wait.
"""

from collections import Counter
from pathlib import Path

import pytest

from .device_waits import PACKAGE, waits_in

FOLDERS = ("bridge", "models/qwen3_omni", "engine_channel")
NUMPY = "an array of the host"
HOST = "a tensor of the host"
WEIGHTS = "while weights are loaded"
ELSEWHERE = "in another thread or process than the scheduler's"
RESULT = "the result has arrived, or is waited for"

REASONS = {
    "bridge/modelled/batches.py": {"batch_cost_s int": "seq_lens_cpu"},
    "bridge/modelled/clock.py": {
        "DeviceClock.book float": NUMPY,
        "ModelledEvent.wait synchronize": "of a modelled device",
    },
    "bridge/platform/audio_input.py": {
        "placeholder_spans nonzero x2": ELSEWHERE,
        "placeholder_spans tolist x2": ELSEWHERE,
    },
    "bridge/platform/cpu_attention.py": {"own_rows tolist x3": "a CPU alone"},
    "bridge/platform/kv_copy.py": {"copy_rows tolist x2": "indices of the host"},
    "bridge/platform/native_moe.py": {
        "_by_expert tolist": "eager prefills without a grouped product: no supported GPU"
    },
    "bridge/rate_meter.py": {"PrefillFit.into tolist": NUMPY, "PrefillFit._fit int": NUMPY},
    "bridge/rounds.py": {
        "Rounds.decide tolist": NUMPY,
        "Rounds.pause bool": NUMPY,
        "Rounds.pauses_any bool": NUMPY,
        "Rounds.admission_order tolist": NUMPY,
        "Rounds._record float": NUMPY,
        "Rounds.report tolist": NUMPY,
    },
    "bridge/scheduler/batch_times.py": {"book_arrival synchronize": RESULT},
    "bridge/scheduler/codes_observer.py": {"_HostFrames.consume tolist": RESULT},
    "bridge/scheduler/talker.py": {"TalkerScheduler.run_batch tolist": "seq_lens_cpu"},
    "bridge/session/compact.py": {"Rebase.due int": HOST},
    "bridge/session/media.py": {"media_before int": HOST, "position_gap int": HOST},
    "bridge/session/radix.py": {"LiveRadixCache.loading_check synchronize": "the load has ended"},
    "bridge/stream_table.py": {
        "StreamTable.is_paused bool": NUMPY,
        "StreamTable.record_urgency nonzero": NUMPY,
        "StreamTable.buffered_s float": NUMPY,
    },
    "bridge/tiers/host.py": {"SessionTier._least_of_all_ranks tolist": HOST},
    "bridge/tiers/host_copies.py": {"HostCopies.compact nonzero": HOST},
    "bridge/tiers/storage.py": {"StoredTails._begin tolist": HOST, "_bytes_of numpy": HOST},
    "engine_channel/inbox.py": {
        "RowsOutbox.send to": "to pinned memory, on a stream of its own",
        "RowsOutbox._run synchronize": ELSEWHERE,
        "RowsOutbox._run numpy": ELSEWHERE,
    },
    "models/qwen3_omni/code2wav.py": {
        "StreamingCode2Wav._build.place to": ELSEWHERE,
        "StreamingCode2Wav._gather tensor": ELSEWHERE,
        "StreamingCode2Wav._gather to": ELSEWHERE,
    },
    "models/qwen3_omni/code2wav_attention.py": {"WindowTransformer.__init__ to": ELSEWHERE},
    "models/qwen3_omni/code_predictor.py": {"CodePredictor._rope to": WEIGHTS},
    "models/qwen3_omni/engine/talker.py": {
        "Qwen3OmniTalker._all_greedy bool": "on a CPU alone",
        "Qwen3OmniTalker._place_audio to x2": "to be repaired: waits in each prefill with audio",
        "Qwen3OmniTalker._place_frames tensor x2": "to be repaired: waits after a retraction",
        "Qwen3OmniTalker._place_frames int x2": "to be repaired: waits after a retraction",
        "Qwen3OmniTalker._frames_of_extend to": "to be repaired: waits in each prefill",
        "Qwen3OmniTalker.load_weights to": WEIGHTS,
    },
    "models/qwen3_omni/engine/talker_weights.py": {"load_predictor_weight int": WEIGHTS},
    "models/qwen3_omni/engine/thinker.py": {
        "Qwen3OmniMoeForConditionalGeneration._audio_features to x2": "to be repaired: pageable",
        "Qwen3OmniMoeForConditionalGeneration._audio_features tolist": "to be repaired: waits",
        "Qwen3OmniMoeForConditionalGeneration._audio_features tensor": "to be repaired: pageable",
        "Qwen3OmniMoeForConditionalGeneration._send_rows nonzero": "to be repaired: waits",
        "Qwen3OmniMoeForConditionalGeneration._send_rows tolist": "to be repaired: waits",
    },
    "models/qwen3_omni/talker_state.py": {"TalkerRows.write_text to": "from pinned memory"},
}


def test_every_place_that_could_wait_for_the_device_has_a_reason():
    found = {}
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            counts = Counter(waits_in(path))
            if counts:
                places = {f"{w} x{n}" if n > 1 else w for w, n in counts.items()}
                found[path.relative_to(PACKAGE).as_posix()] = places
    assert found == {file: set(reasons) for file, reasons in REASONS.items()}


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("x.item()", ["f item"]),
        ("x.tolist()", ["f tolist"]),
        ("x.nonzero()", ["f nonzero"]),
        ("x.cpu()", ["f cpu"]),
        ("int(x.max())", ["f int"]),
        ("bool(x[0])", ["f bool"]),
        ("torch.tensor(y, device=d)", ["f tensor"]),
        ("x.to(d)", ["f to"]),
        ("x.to(device=d, dtype=torch.int64)", ["f to"]),
        ("x.to(torch.int64)", []),
        ("x.to(y.dtype)", []),
        ("x.to(dtype=torch.int64, copy=True)", []),
        ("torch.tensor(y)", []),
        ("int(text)", []),
        ("copy_to(x, d)", []),
    ],
)
def test_the_search_finds_reads_and_copies_and_no_conversions(tmp_path: Path, line, waits):
    path = tmp_path / "code.py"
    path.write_text(f"def f(x, y, d, text):\n    {line}\n")
    assert list(waits_in(path)) == waits
