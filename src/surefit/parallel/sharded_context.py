"""Shared tokens and sharded weights: for long contexts of a model that a device could not hold beside them.

Context parallelism sums the gradients over all processes, and so does `fully_shard` with the shards that it hands out.
So the weights are sharded over all processes of a replica, whoever shares tokens with whom; keys and values travel
within the groups that share tokens, and nothing else is exchanged.
"""

from __future__ import annotations

from peft import PeftModel
from transformers import PreTrainedModel

from surefit.parallel.context_parallel import SharedTokens
from surefit.parallel.fsdp import FullySharded


class ShardedContext(SharedTokens, FullySharded):
    """Groups of processes that share the tokens of each micro batch, and together hold the weights in shards.

    Args:
        world: all processes, joined.
        size: processes that share a token sequence.
        replicas, offload: as `FullySharded` has them.
    """

    def _require_shareable(self, model: PreTrainedModel | PeftModel) -> None:
        super()._require_shareable(model)
        self.root.reshard()  # after a backward pass it happens by itself
