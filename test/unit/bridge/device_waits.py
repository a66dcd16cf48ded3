"""Places in which the scheduler's thread could wait for the device, from the source.

A read of a device's tensor (`item`, `tolist`, `nonzero`, `cpu`, `int(x.max())` …) waits until the
device has computed it, and so does a copy to the device from pageable memory. On a CPU neither
costs anything, so only the source tells. Comparisons of tensors and indices by masks are not found.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "python" / "sglang_live"
READS = {"item", "tolist", "nonzero", "cpu", "numpy", "cuda", "synchronize", "argwhere", "unique"}
REDUCTIONS = {"max", "min", "sum", "any", "all", "argmax", "argmin", "mean"}
MAKERS = {"torch.tensor", "torch.as_tensor", "torch.from_numpy"}

NUMPY = "an array of the host"
HOST = "a tensor of the host"
WEIGHTS = "while weights are loaded"
ELSEWHERE = "in another thread or process than the scheduler's"
RESULT = "the result has arrived, or is waited for"

REASONS = {
    "bridge/grammars/call_end.py": {"CallGrammar.fill_vocab_mask int": HOST},
    "bridge/scheduler/device_turns.py": {
        "Asking.before_result synchronize": "SGLang waits for the same result next",
    },
    "extensions/elastic/engine/cuda_granules.py": {
        "CudaGranules.close synchronize": "nothing uses the pool any more",
        "CudaGranules._wipe synchronize": ELSEWHERE,
        "CudaGranules.unmap_wiped synchronize": ELSEWHERE,
    },
    "extensions/lending/engine/cuda_memory.py": {
        "CudaMemory.clear synchronize": "while the engine starts, or in a lender without one",
        "CudaMemory.close synchronize": "a lender has died, and its memory is unmapped",
    },
    "extensions/lending/engine/shared_memory.py": {
        "Launched.synchronize synchronize": "after a lender's pages were overwritten for a test",
    },
    "bridge/platform/audio_input.py": {
        "placeholder_spans nonzero x2": ELSEWHERE,
        "placeholder_spans tolist x2": ELSEWHERE,
    },
    "bridge/platform/cpu_attention.py": {"own_rows tolist x3": "a CPU alone"},
    "bridge/platform/cpu_seeds.py": {"murmur_hash32 to": "a CPU alone"},
    "bridge/platform/kv_copy.py": {"_copy_runs tolist x2": "indices of the host"},
    "bridge/platform/native_moe.py": {
        "_by_expert tolist": "eager prefills without a grouped product: no supported GPU"
    },
    "bridge/lateness.py": {"Lateness.take float": NUMPY},
    "bridge/least_squares.py": {"non_negative int": NUMPY},
    "bridge/rate_meter.py": {
        "PrefillFit.take float": NUMPY,
        "PrefillFit.into tolist": NUMPY,
    },
    "bridge/round_cost.py": {"RoundCostMeter.take tolist x2": NUMPY},
    "bridge/rounds.py": {
        "Rounds.decide tolist": NUMPY,
        "Rounds.slack_of float": NUMPY,
        "Rounds.pause bool": NUMPY,
        "Rounds.pauses_any bool": NUMPY,
        "Rounds.admission_order tolist": NUMPY,
        "Rounds.admits_others tolist": NUMPY,
        "Rounds.requeue nonzero": NUMPY,
        "Rounds.requeue tolist": NUMPY,
        "Rounds.retracted_first tolist": NUMPY,
        "Rounds._record float": NUMPY,
        "Rounds.report tolist": NUMPY,
        "Rounds.retraction_order tolist x2": NUMPY,
        "Rounds.spare tolist": NUMPY,
    },
    "bridge/scheduler/batch_times.py": {
        "book_arrival synchronize": RESULT,
        "launch_work int": "seq_lens_cpu",
    },
    "bridge/prompt_groups.py": {"n_alike int": NUMPY},
    "bridge/scheduler/best_effort.py": {"class_of float": HOST},
    "bridge/scheduler/codes_observer.py": {"_HostFrames.consume tolist": RESULT},
    "bridge/scheduler/talker.py": {
        "Talker._on_prompt tolist": "codes of the announcement, on the host",
        "Talker.before_launch tolist": "seq_lens_cpu",
    },
    "bridge/session/compact.py": {
        "Rebase.due int": HOST,
        "_turns_by cpu x2": "while the engine starts",
    },
    "bridge/session/media.py": {"media_before int": HOST, "position_gap int": HOST},
    "bridge/stream_table.py": {
        "StreamTable._has bool": NUMPY,
        "StreamTable.record_urgency nonzero": NUMPY,
        "StreamTable.remove int": NUMPY,
        "StreamTable.step int": NUMPY,
        "StreamTable.step float": NUMPY,
    },
    "extensions/elastic/engine/pool.py": {
        "ElasticPool.release int": "a part of the tail is in use after a second",
        "ElasticPool.release nonzero x2": "a part of the tail is in use after a second",
    },
    "bridge/tiers/host.py": {
        "SessionTier._least_of_all_ranks tolist": HOST,
        "SessionTier.take_loads synchronize": "the load has ended",
    },
    "extensions/lending/broker.py": {
        "_Engine.n_ranks int": ELSEWHERE,
        "_Engine.rank int": ELSEWHERE,
    },
    "extensions/lending/slots.py": {"PeerSlots.touches bool": NUMPY, "_Lease.n_used int": NUMPY},
    "extensions/lending/engine/leases.py": {
        "Leases._offer_taken synchronize": "zeros that were launched a round before",
        "PoolRuns.take cpu": "a CPU alone: no lender's memory is shared on CUDA",
        "PoolRuns.take int": NUMPY,
        "PoolRuns.take numpy": "a CPU alone: no lender's memory is shared on CUDA",
        "Leases.report float": NUMPY,
    },
    "extensions/lending/engine/peer_copies.py": {
        "PeerCopies.free_slots numpy": HOST,
        "PeerCopies.reset synchronize": "a flush",
        "PeerCopies.sessions_in numpy": HOST,
    },
    "extensions/lending/engine/peer_pool.py": {
        "PeerPool._on_device to": "from pinned memory",
        "PeerPools.transfers tolist": HOST,
        "PeerPools.transfers unique": HOST,
    },
    "bridge/tiers/session_copies.py": {"SessionCopies.compact nonzero": HOST},
    "bridge/tiers/storage.py": {"StoredTails._begin tolist": HOST, "_bytes_of numpy": HOST},
    "engine_channel/inbox.py": {
        "RowsOutbox.send to": "to pinned memory, on a stream of its own",
        "RowsOutbox._run synchronize": ELSEWHERE,
    },
    "extensions/lending/table.py": {
        "LeaseTable._answer int x2": NUMPY,
        "LeaseTable.leases tolist x4": NUMPY,
        "LeaseTable.left tolist x2": NUMPY,
        "LeaseTable.offer int x2": NUMPY,
        "LeaseTable.recall int": NUMPY,
        "LeaseTable.release int": NUMPY,
        "LeaseTable.states tolist": NUMPY,
        "LeaseTable.used int": NUMPY,
    },
    "engine_channel/states.py": {"to_array numpy": ELSEWHERE},
    "models/qwen3_omni/engine/thinker.py": {
        "Qwen3OmniMoeForConditionalGeneration._audio_features tolist": "masks stay on the host",
        "media_spans tolist": "SGLang keeps the grids of pictures on the host",
    },
    "models/qwen3_tts/parts.py": {"TTSTalker.make_voice numpy": ELSEWHERE},
    "models/speech_lm/code2wav_layers.py": {
        "WindowTransformer.__init__ to": ELSEWHERE,
        "WindowTransformer.gather tensor": ELSEWHERE,
    },
    "models/speech_lm/code_predictor.py": {
        "CodePredictor._rope cpu": WEIGHTS,
        "CodePredictor._rope to": WEIGHTS,
    },
    "models/speech_lm/engine/steps.py": {"all_greedy bool": "on a CPU alone"},
    "models/speech_lm/engine/talker.py": {"SpeechLM.prepare to": WEIGHTS},
    "models/speech_lm/engine/weights.py": {"load_predictor_weight int": WEIGHTS},
    "models/speech_lm/frame_decoder.py": {
        "Code2WavGraphs._fill synchronize": ELSEWHERE,
        "FrameDecoder._place to": ELSEWHERE,
        "FrameDecoder._gather to": ELSEWHERE,
    },
}

# Reads that the source does not show, seen by lab/recorders/wait_recorder.py in an engine.
REASONS_AT_RUNTIME = {
    ("models/speech_lm/code_predictor.py", "traced.<locals>.predict"): "on a CPU alone",
}


def waits_in(path: Path) -> Iterator[str]:
    """ "<function> <what>" of each place in a file."""
    yield from _walk(ast.parse(path.read_text()), [])


def _walk(node: ast.AST, scope: list[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = [*scope, child.name]
        elif isinstance(child, ast.Call) and (what := _what(child)):
            yield f"{'.'.join(scope)} {what}"
        yield from _walk(child, inner)


def _what(call: ast.Call) -> str:
    """Name of a call that could wait; empty for others."""
    if isinstance(call.func, ast.Name):
        argument = call.args[0] if call.args else None
        reads = isinstance(argument, ast.Subscript) or (
            isinstance(argument, ast.Call)
            and isinstance(argument.func, ast.Attribute)
            and argument.func.attr in REDUCTIONS
        )
        return call.func.id if reads and call.func.id in ("int", "bool", "float") else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    if ast.unparse(call.func) in MAKERS:
        return call.func.attr if any(word.arg == "device" for word in call.keywords) else ""
    if call.func.attr == "to":
        return "" if all(map(_is_dtype, call.args)) and not _names_device(call) else "to"
    return call.func.attr if call.func.attr in READS else ""


def _names_device(call: ast.Call) -> bool:
    return any(word.arg == "device" for word in call.keywords)


def _is_dtype(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text == "dtype" or text.endswith(".dtype") or text.startswith(("torch.int", "torch.f"))
