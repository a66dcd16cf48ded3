"""Prefill graphs, where they are asked for, suit the models of this project."""

TARGET = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.PrefillCudaGraphRunner"
KIND = "replace"
SIGNATURE = "(model_runner: 'ModelRunner')"
WHY = "upstream's replay leaves out the ids of requests, and the embeddings of a talker's prompt"
DROP_WHEN = "upstream's replay keeps the ids, and takes embeddings from a model of text"
STAGES = ("thinker", "talker")
CPU_ONLY = False
HOOK = "sglang_live.bridge.prefill_graphs:PrefillGraphs"
