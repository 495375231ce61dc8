"""Context parallelism with sharded weights: long contexts for a model that a single device could not hold as well.

Context parallelism sums the gradients over all processes, and so does `fully_shard` when it scatters them. So the
weights are sharded over all processes of a replica, independently of the groups that share tokens; keys and values are
exchanged within those groups, and nothing else is.
"""

from __future__ import annotations

from peft import PeftModel
from transformers import PreTrainedModel

from surefit.parallel.context_parallel import SharedTokens
from surefit.parallel.fsdp import FullySharded


class ShardedContext(SharedTokens, FullySharded):
    """Engine whose processes share the tokens of each micro batch in groups, and hold the weights in shards.

    Args:
        world: all processes, joined.
        size: number of processes that share a token sequence.
        replicas, offload: arguments of `FullySharded`.
    """

    def _require_shareable(self, model: PreTrainedModel | PeftModel) -> None:
        super()._require_shareable(model)
        self.root.reshard()  # after a backward pass FSDP does this by itself
