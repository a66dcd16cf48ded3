"""SGLang 0.5.23's private and undocumented names that bridge and models use.

scripts/check_seams.py compares them with the installed SGLang. The hooks' own targets are in
sgl_patches/.
"""

from lab.upstream.comparison import Upstream
from lab.upstream.engine_names import ENGINE_NAMES

NAMES = (
    Upstream(
        "sglang.srt.managers.scheduler.Scheduler",
        functions={
            "init_ipc_channels": "self, port_args",
            "init_idle_sleeper": "self",
            "init_model_worker": "self",
            "init_running_status": "self",
            "init_memory_pools": "self",
            "init_req_max_new_tokens": "self, req",
            "send_abort_output": "self, abort_req, req",
            "init_request_dispatcher": "self",
            "init_invariant_checker": "self",
            "init_load_inquirer": "self",
            "_poll_timeout_aborts": "self",
            "process_input_requests": "self, recv_reqs",
            "open_session": "self, recv_req",
            "get_next_batch_to_run": "self, running_batch, last_batch",
            "get_new_batch_prefill": "self, running_batch",
            "update_running_batch": "self, batch",
            "run_batch": "self, batch, pp_proxy_tensors=",
            "process_batch_result": "self, batch, result",
            "handle_generate_request": "self, recv_req, *, mm_input_error=",
            "_add_request_to_queue": "self, req, is_retracted=",
            "_release_aborted_request": "self, req",
            "collect_inflight_reqs": "self",
            "abort_request": "self, recv_req",
            "is_fully_idle": "self, for_health_check=, ignore_waiting=",
            "pause_generation": "self, recv_req",
            "on_idle": "self",
            "process_pending_chunked_abort": "self",
            "get_num_allocatable_reqs": (
                "self, running_bs, beam_width=, running_batch=, num_held_rows="
            ),
        },
        attributes=(
            "_request_dispatcher _pending_chunked_abort_req chunked_req "
            "chunked_prefill_size waiting_queue running_batch session_controller "
            "ipc_channels idle_sleeper pool_stats_observer invariant_checker "
            "load_inquirer new_token_ratio_tracker forward_stream_ctx "
            "max_total_num_tokens req_to_token_pool token_to_kv_pool_allocator "
            "tree_cache tp_worker spec_algorithm enable_overlap enable_lora device_module "
            "attn_dp_enabled enable_priority_scheduling kv_events_publisher "
            "beam_coordinator max_req_len max_req_input_len model_config"
        ),
        used_in="bridge/scheduler",
    ),
    Upstream(
        "sglang.srt.managers.scheduler",
        functions={"_make_abort_req": "req, finished_reason="},
        used_in="extensions/elastic/engine/part.py",
    ),
    Upstream(
        "sglang.srt.managers.schedule_policy",
        attributes="CLIP_MAX_NEW_TOKENS",
        used_in="extensions/elastic/engine/part.py",
    ),
    Upstream(
        "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator",
        functions={"clear": "self", "get_kvcache": "self"},
        attributes="free_pages release_pages need_sort size page_size",
        used_in="extensions/elastic/engine/pool.py",
    ),
    Upstream(
        "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator",
        functions={"clear": "self", "get_kvcache": "self"},
        attributes="free_pages staged_pages num_staged_pages num_pages need_sort size",
        used_in="extensions/elastic/engine/pool.py",
    ),
    Upstream(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        functions={
            "init_new": (
                "reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, "
                "model_config, enable_overlap, spec_algorithm, chunked_req=, "
                "dllm_config="
            ),
            "filter_batch": "self, reqs_to_exclude=, keep_indices=",
            "merge_batch": "self, other",
            "check_decode_mem": "self, selected_indices=",
            "is_empty": "self",
        },
        attributes=(
            "batch_is_full req_pool_indices req_pool_indices_cpu seq_lens "
            "seq_lens_cpu orig_seq_lens seq_lens_sum multimodal_inputs out_cache_loc "
            "sampling_info input_ids chunked_req extend_num_tokens prefix_lens extend_lens"
        ),
        used_in="bridge/scheduler",
    ),
    Upstream(
        "sglang.srt.managers.schedule_batch.Req",
        functions={
            "finished": "self",
            "detach_kv": "self",
            "release_mm_inputs_on_abort": "self",
            "reset_for_retract": "self",
        },
        attributes=(
            "priority host_loaded_length num_matched_prefix_tokens "
            "kv session to_finish finished_reason retracted_stain prefix_len extend_end "
            "host_hit_length output_ids origin_input_ids "
            "origin_input_ids_unpadded full_untruncated_fill_ids "
            "send_token_offset cur_decode_ids_len multimodal_inputs extra_key "
            "cache_salt last_node lock skip_radix_cache_insert beam_group"
        ),
        used_in="bridge",
    ),
    Upstream(
        "sglang.srt.managers.schedule_batch.ReqKvInfo",
        attributes=("req_pool_idx kv_committed_len kv_allocated_len cache_protected_len holds_kv"),
        used_in="bridge",
    ),
    Upstream(
        "sglang.srt.managers.schedule_batch",
        functions={
            "release_req": (
                "*, req, remaing_req_count, req_to_token_pool, "
                "token_to_kv_pool_allocator, tree_cache, hisparse_coordinator, "
                "offload_kv="
            ),
        },
        used_in="bridge/scheduler/memory.py",
    ),
    Upstream(
        "sglang.srt.mem_cache.common",
        functions={"release_kv_cache": "req, tree_cache, *, checkpoint"},
        used_in="bridge/scheduler/best_effort.py",
    ),
    Upstream(
        "sglang.srt.mem_cache.cache_init_params.CacheInitParams",
        attributes="eviction_policy",
        used_in="bridge/cache/radix.py",
    ),
    Upstream(
        "sglang.srt.managers.scheduler_components.new_token_ratio_tracker.NewTokenRatioTracker",
        functions={"estimate_new_token_ratio_after_retract": "reqs"},
        attributes="current",
        used_in="bridge/scheduler/memory.py",
    ),
    Upstream(
        "sglang.srt.managers.schedule_batch.MultimodalInputs",
        functions={
            "release_features": "self",
        },
        attributes=(
            "mm_items mrope_positions mrope_position_delta mrope_position_delta_repeated_cache"
        ),
        used_in="bridge/session/media.py",
    ),
    Upstream(
        "sglang.srt.managers.utils.GenerationBatchResult",
        attributes="copy_done",
        used_in="bridge/scheduler/batch_times.py",
    ),
    Upstream(
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator",
        attributes="is_required penalizers",
        used_in="bridge/scheduler/paused.py",
    ),
    Upstream(
        "sglang.srt.managers.schedule_policy",
        attributes="CLIP_MAX_NEW_TOKENS",
        used_in="bridge/scheduler/slicing.py",
    ),
    Upstream(
        "sglang.srt.runtime_context.ParallelContext",
        attributes="tp_rank tp_group attn_dp_enabled",
        used_in="models, extensions/lending/engine/lease_facts.py",
    ),
    Upstream(
        "sglang.srt.distributed.parallel_state.GroupCoordinator",
        functions={"broadcast_object": "self, obj=, src="},
        used_in="extensions/lending/engine/lease_facts.py",
    ),
    Upstream(
        "sglang.srt.session.session_controller.Session",
        functions={
            "abort_req": "self",
            "is_timed_out": "self",
        },
        attributes=(
            "_inflight req_nodes streaming session_id committed_origin_len "
            "committed_unpadded_len committed_fill_len close_on_finish"
        ),
        used_in="bridge/session",
    ),
    Upstream(
        "sglang.srt.session.session_controller.SessionController",
        functions={
            "__contains__": "self, session_id",
            "get": "self, session_id",
            "maybe_reap": "self, now, interval=",
            "_close": "self, session_id",
            "_all_requests_finished": "session",
        },
        attributes="sessions",
        used_in="bridge/session",
    ),
    Upstream(
        "sglang.srt.session.streaming_session.StreamingSession",
        functions={
            "_free_tail": "self, kv, prefix_len",
            "_trim_overshoot": "self, req, finished_len",
            "try_match_prefix": "self, params",
            "try_cache_finished_req": "self, req",
            "try_checkpoint": "self, req, *, up_to, **kwargs",
            "take": "self, req",
            "borrowed_slot": "self, req",
            "release_session": "self, session_id",
        },
        attributes="slots cache",
        used_in="bridge/session",
    ),
    Upstream(
        "sglang.srt.session.streaming_session.SessionSlot",
        attributes="kv virtual_node lock publishes_prompt",
        used_in="bridge/session",
    ),
    Upstream(
        "sglang.srt.session.streaming_session._VirtualNode",
        used_in="bridge/session/kv_record.py",
    ),
    Upstream(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
        functions={
            "_apply_cache_actions": "self, actions",
            "_all_reduce": "self, data, tp_reduce_op",
            "_pad_retraction_indices": "indices, page_size",
            "_count_ready_acks": "self, ack_queue",
            "_reset_full": "self",
            "_finish_write_through_ack": "self, ack_id",
            "_log_write_ack_metrics": "self, ack",
            "loading_check": "self, finish_count=",
            "writing_check": "self, write_back=, finish_count=",
            "check_hicache_events": "self",
            "init_load_back": "self, params",
            "insert": "self, params",
            "evict": "self, params",
            "evict_for_alloc": "self, params, *, allocation_reclaim_satisfied=",
            "evict_host": "self, num_tokens, component_type=",
            "free_kv_row": "self, kv, ranges",
            "lock": "self, node_id, skip_lock_components=",
            "unlock": "self, lock",
            "inc_host_lock_ref": "self, node_id",
            "dec_host_lock_ref": "self, node_id, params",
            "prefix_device_indices": "self, req",
            "session_records": "self",
            "evictable_size": "self",
            "full_evictable_size": "self",
        },
        attributes="tree_core host_pool_group cache_controller session",
        used_in="bridge/session",
    ),
    Upstream(
        "sglang.srt.mem_cache.pool_host.common",
        functions={"_cuda_host_unregister": "buffer"},
        attributes="_CUDA_HOST_REGISTERED_RANGES_ATTR",
        used_in="bridge/platform/host_pool.py",
    ),
    Upstream(
        "sglang.srt.mem_cache.registry",
        functions={
            "create_unified_radix_cache": "ctx, *, cache_class=",
        },
        used_in="bridge/cache/radix.py",
    ),
    Upstream(
        "sglang.srt.managers.cache_controller.HiCacheController",
        functions={
            "load": "self, host_indices, priority=, node_id=",
            "start_writing": "self",
        },
        attributes=(
            "write_queue ack_write_queue ack_load_queue mem_pool_host "
            "load_fence_stream l2_transfer_engine io_backend"
        ),
        used_in="bridge/tiers",
    ),
    Upstream(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController",
        functions={
            "_move_op_indices": "self, op",
            "_l2_load_transfers": "self, host_indices, device_indices, pool_transfers=",
            "_transfer_num_bytes": "self, op",
            "_num_tokens_by_pool": "self, op",
        },
        attributes="transfer_layer_id_max",
        used_in="bridge/tiers/host_copies.py",
    ),
    Upstream(
        "sglang.srt.managers.cache_controller.CacheOperation",
        functions={
            "__init__": ("self, host_indices, device_indices, node_id, priority=, pool_transfers="),
        },
        attributes="node_ids",
        used_in="bridge/tiers/host_copies.py",
    ),
    Upstream(
        "sglang.srt.managers.cache_controller.HiCacheAck",
        functions={
            "__init__": "self, *args, **kwargs",
        },
        attributes="timing_enabled num_bytes finish_event start_event node_ids",
        used_in="bridge/tiers",
    ),
    Upstream(
        "sglang.srt.mem_cache.l2_transfer.L2TransferEngine",
        functions={
            "submit_device_to_host": "self, transfers",
            "submit_host_to_device": (
                "self, transfers, *, transfer_layer_id_max, start_event=, on_layer_done="
            ),
        },
        attributes="device_to_host_stream host_to_device_stream",
        used_in="bridge/tiers",
    ),
    Upstream(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding",
        functions={
            "_compute_inv_freq": "self, base",
        },
        attributes="base is_neox_style rotary_dim cos_sin_cache",
        used_in="bridge/session/compact.py",
    ),
    Upstream(
        "sglang.srt.plugins.hook_registry.HookRegistry",
        functions={
            "register": "target, hook, hook_type=, *, source=",
            "apply_hooks": "",
        },
        attributes="_patched",
        used_in="bridge/seams.py",
    ),
    *ENGINE_NAMES,
)
