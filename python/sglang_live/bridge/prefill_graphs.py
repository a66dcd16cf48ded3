"""Prefill graphs for models that read their requests beside the layers.

SGLang captures the layers of a model, with attention between the captured segments, and runs the
rest of its forward in Python. A talker embeds its prompt by its requests, and a thinker sends what
a layer computed by request: both need the ids of the requests, which SGLang's replay leaves out.
"""

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner


class PrefillGraphs(PrefillCudaGraphRunner):
    def _input_embeds_hidden_size(self) -> int:
        """Called before the inputs of the graphs are allocated.

        Raises:
            ValueError: prefill graphs of another kind than `breakable`.
        """
        if self.prefill_backend_name != Backend.BREAKABLE:
            raise ValueError(
                f"--cuda-graph-backend-prefill {self.prefill_backend_name}: this engine can "
                "capture prefills as breakable only"
            )
        # Embeddings are an input: the ids of a talker's prompt are not those of its embedding.
        self.is_multimodal = True
        return super()._input_embeds_hidden_size()

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        # Features of pictures enter at several layers, and the graphs have no input for them.
        pictures = forward_batch.contains_image_inputs() or forward_batch.contains_video_inputs()
        # A talker has their states, at positions of three axes.
        talker_sees = getattr(self.model_runner.model, "sees", None)
        pictures = pictures or (talker_sees is not None and talker_sees(forward_batch))
        return not pictures and super().can_run_graph(forward_batch)

    def load_batch(
        self, forward_batch: ForwardBatch, **kwargs: Any
    ) -> tuple[ForwardBatch, SharedReadEnds]:
        padded, ends = super().load_batch(forward_batch, **kwargs)
        padded.rids = forward_batch.rids
        return padded, ends
