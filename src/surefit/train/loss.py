"""The loss: cross-entropy of the supervised tokens, summed or of each token, through the model's own output head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from surefit.config.schema import ParallelSection
from surefit.core.errors import ConfigError, ModelError
from surefit.data.tokens.collate import OWN_KEYS, UNREAD_KEYS
from surefit.facts.activations import LOSS_TILE, chunk_rows
from surefit.model.compat import avoid_mask_syncs, stub_forward
from surefit.model.sdpa import capability_of


def loss_sum(
    model: torch.nn.Module, batch: Mapping[str, Any], chunked: bool, balance: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the summed cross-entropy of one micro batch, 0-d float32 in nats, on the model's device; 0 without
    targets.

    A mixture of experts with `output_router_logits: true` in its config.json adds its load-balancing loss (Fedus et al.
    2022, equations 4 to 6), times `router_aux_loss_coef` and the number of targets, where gradients are enabled: a mean
    over micro batches weighs each by its targets.

    Chunked, neither the logits of all tokens nor the logits of all supervised tokens exist at any time: the decoder's
    hidden states of the supervised tokens go through the head one chunk at a time, and each chunk's gradient is
    computed at once. If `chunked_loss_obstacle` returns a reason, the full logits are computed instead.

    Args:
        model: a causal language model, with or without LoRA factors.
        batch: from data/tokens/collate.py: tensors are moved to the model's device, other values are passed unchanged.
        chunked: False computes the logits of all tokens, and the loss from the supervised tokens' logits in float32.
        balance: list that the router's contribution to the sum is appended to, detached.

    Raises:
        ModelError: the model calls its decoder in a way that cannot be chunked.
    """
    loss, router_loss = _cross_entropy(model, batch, chunked, "sum")
    if router_loss is None:
        return loss
    weighted = router_loss * supervised_tokens(batch)
    if balance is not None:
        balance.append(weighted.detach())
    return loss + weighted


def token_losses(
    model: torch.nn.Module, batch: Mapping[str, Any], chunked: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the cross-entropy of each supervised token, which is minus its log-probability: (n,) float32 in nats, in
    the order of `targets`; and the router's weighted loss of the micro batch, 0-d, as `loss_sum` describes it.

    Chunked, a row of the hidden states' gradient is computed with the token's loss and only scaled in the backward
    pass. Where the head itself is trained, that is not possible: its gradient sums the tokens, whose coefficients are
    known only then, so each chunk's logits are computed again in the backward pass.

    Args, raises: as `loss_sum`.
    """
    return _cross_entropy(model, batch, chunked, "none")


@torch.no_grad()
def exact_token_losses(model: torch.nn.Module, batch: Mapping[str, Any], chunked: bool) -> torch.Tensor:
    """Return `token_losses` computed in float64 from the model's logits, by another way than the loss: to compare."""
    inputs, rows, targets = _inputs(model, batch)
    if not chunked or chunked_loss_obstacle(model) is not None:
        with avoid_mask_syncs(batch):
            logits = model(**inputs).logits.flatten(0, 1)
        return _in_float64(logits, rows, targets)
    with avoid_mask_syncs(batch):
        _, hidden, head, _ = _decode(model, inputs, rows)
    losses = [torch.empty(0, dtype=torch.float64, device=hidden.device)]
    # The chunks of the loss itself: in 16 bits another kernel may round a logit otherwise.
    size = max(1, chunk_rows(len(hidden), head.vocabulary, head.number))
    for states, chunk_targets in zip(torch.split(hidden, size), torch.split(targets, size), strict=True):
        losses.append(_in_float64(head(states), torch.arange(len(states), device=hidden.device), chunk_targets))
    return torch.cat(losses)


def _in_float64(logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of some rows of the logits, float64: a few hundred at a time, since all would take
    several times the memory of a step."""
    losses = torch.empty(len(rows), dtype=torch.float64, device=logits.device)
    for start in range(0, len(rows), LOSS_TILE):
        part = slice(start, start + LOSS_TILE)
        losses[part] = F.cross_entropy(logits[rows[part]].double(), targets[part], reduction="none")
    return losses


def supervised_tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens of a micro batch that the loss counts."""
    return len(batch["targets"])


def _inputs(model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return the model's inputs, the rows of the supervised tokens and these tokens, on the model's device."""
    device = next(model.parameters()).device
    on_device = {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name not in UNREAD_KEYS
    }
    # No KV cache: it costs memory, and transformers treats a batch with a cache as the start of a generation.
    inputs = {name: value for name, value in on_device.items() if name not in OWN_KEYS} | {"use_cache": False}
    return inputs, on_device["loss_rows"], on_device["targets"]


def _cross_entropy(
    model: torch.nn.Module, batch: Mapping[str, Any], chunked: bool, reduction: Literal["sum", "none"]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the cross-entropy of a micro batch, summed or of each token, and the router's weighted loss."""
    inputs, rows, targets = _inputs(model, batch)
    if not chunked or chunked_loss_obstacle(model) is not None:
        with avoid_mask_syncs(batch):
            answer = model(**inputs)
        logits = answer.logits.flatten(0, 1).index_select(0, rows)
        return F.cross_entropy(logits.float(), targets, reduction=reduction), _router_loss(model, answer)
    with avoid_mask_syncs(batch):
        answer, hidden, head, head_parameters = _decode(model, inputs, rows)
    if torch.is_grad_enabled():
        function = _ChunkedLoss if reduction == "sum" else _ChunkedTokenLosses
        loss: torch.Tensor = function.apply(head, targets, hidden, *head_parameters)  # type: ignore[no-untyped-call]
        return loss, _router_loss(model, answer)
    return _through_chunks(head, targets, hidden, [], reduction=reduction)[0], None


def balances_experts(model: torch.nn.Module) -> bool:
    """Return whether config.json enables the router's load-balancing loss."""
    return bool(getattr(_causal_lm(model).config.get_text_config(), "output_router_logits", False))


def require_whole_routing(model: torch.nn.Module, parallel: ParallelSection) -> None:
    """Raise if the router's loss is enabled and no process sees all layers and tokens of a micro batch.

    Raises:
        ConfigError: it is enabled, and layers or tokens are split over processes.
    """
    if balances_experts(model) and (parallel.mode == "pp" or parallel.cp > 1):
        raise ConfigError(
            "config.json enables the router loss, which needs all layers and tokens, but the processes split them",
            code="E5106",
            field="parallel.mode",
            help="set parallel.mode: ddp, or output_router_logits: false in the model's config.json",
        )


def _router_loss(model: torch.nn.Module, answer: Any) -> torch.Tensor | None:
    """Return the weighted router loss that the model has computed in its forward pass; None without one."""
    router_loss = getattr(answer, "aux_loss", None)
    if not torch.is_grad_enabled() or not isinstance(router_loss, torch.Tensor):
        return None
    causal_lm = _causal_lm(model)
    holders = (causal_lm, causal_lm.config.get_text_config())
    names = ("router_aux_loss_coef", "aux_loss_coef")
    weight = next((getattr(holder, name) for holder in holders for name in names if hasattr(holder, name)), 0.0)
    return router_loss.float() * weight


def chunked_loss_obstacle(model: torch.nn.Module) -> str | None:
    """Return why the loss of this model cannot be computed in chunks; None if it can."""
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "its adapter prepends tokens to the prompt"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # Every chunk would gather the head's weight from all processes, and these have different numbers of chunks.
        return "ZeRO-3 gathers the output head only during the forward pass"
    causal_lm = _causal_lm(model)
    decoder = causal_lm.get_decoder() if hasattr(causal_lm, "get_decoder") else None
    if decoder is None or decoder is causal_lm:
        return "its decoder and its output head are one module"
    head = causal_lm.get_output_embeddings()
    if head is None or any(module is head for module in decoder.modules()):
        return "it has no output head outside of its decoder"
    return None


@dataclass(frozen=True)
class _Head:
    """Everything that a causal language model computes after its decoder: projection, scale, softcap, LoRA on the head.

    Attributes:
        output: type of the decoder's output.
        vocabulary: number of logits per hidden state.
        number: bytes per logit.
    """

    causal_lm: Any
    decoder: torch.nn.Module
    output: type[Any]
    vocabulary: int
    number: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits (n, vocabulary) of hidden states (n, hidden size)."""
        # The decoder is stubbed to return the given states, so that the model's own forward does the rest: transformers
        # has no function for it, and a copy of the head's arithmetic would have to be maintained for every family.
        answer = self.output(last_hidden_state=hidden[None])
        plain = {"output_router_logits": False} if balances_experts(self.causal_lm) else {}
        with stub_forward(self.decoder, answer):
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.causal_lm(input_ids=ids, use_cache=False, **plain).logits
        return logits.squeeze(0)


def _causal_lm(model: torch.nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _decode(
    model: torch.nn.Module, inputs: Mapping[str, Any], rows: torch.Tensor
) -> tuple[Any, torch.Tensor, _Head, list[torch.Tensor]]:
    """Return the model's output without its logits, the hidden states (n, hidden size) at `rows`, the head, and the
    trained parameters that the head reads.

    The model runs as usual, but its head gets a single hidden state: the graph of its logits reveals the head's
    parameters.
    """
    causal_lm = _causal_lm(model)
    decoder = causal_lm.get_decoder()
    hidden: list[torch.Tensor] = []
    kinds: list[type[Any]] = []

    def take(module: torch.nn.Module, args: Any, output: Any) -> Any:
        states = output.last_hidden_state
        hidden.append(states.flatten(0, 1).index_select(0, rows))
        kinds.append(type(output))
        routers = {"router_logits": output.router_logits} if getattr(output, "router_logits", None) else {}
        return type(output)(last_hidden_state=states[:1, :1].detach(), **routers)

    hook = decoder.register_forward_hook(take)
    try:
        answer = model(**inputs)
    finally:
        hook.remove()
    logits = answer.logits
    if len(hidden) != 1 or logits.shape[:2] != (1, 1):
        raise ModelError(
            f"{type(causal_lm).__name__} has more than an output head between its decoder and its logits",
            code="E5107",
            field="speed.chunked_loss",
            help="set speed.chunked_loss: false",
        )
    head = _Head(causal_lm, decoder, kinds[0], logits.shape[-1], logits.element_size())
    return answer, hidden[0], head, _trained_leaves(logits)


def _trained_leaves(output: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters that a gradient of `output` would reach, in a fixed order."""
    leaves: dict[int, torch.Tensor] = {}
    pending, visited = [output.grad_fn], {None}
    while pending:
        node: Any = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        pending.extend(parent for parent, _ in node.next_functions)
    return list(leaves.values())


class _ChunkedLoss(torch.autograd.Function):
    """(head, targets, hidden, *trained parameters of the head) → summed cross-entropy.

    The gradients are computed with the loss, chunk by chunk, so that no logits live until the backward pass and none
    are computed twice; the backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, head: _Head, targets: torch.Tensor, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.types = [tensor.dtype for tensor in (hidden, *trained)]
        loss, ctx.gradients = _through_chunks(head, targets, hidden, trained, hidden.requires_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, (
            "the backward pass of this loss can run only once, because it scales the gradients in place"
        )
        scaled = (
            None if gradient is None else gradient.mul_(scale).to(dtype)
            for gradient, dtype in zip(gradients, ctx.types, strict=True)
        )
        return None, None, *scaled


class _ChunkedTokenLosses(torch.autograd.Function):
    """(head, targets, hidden, *trained parameters of the head) → cross-entropy of each target, (n,)."""

    @staticmethod
    def forward(
        ctx: Any, head: _Head, targets: torch.Tensor, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        once = hidden.requires_grad and not trained
        losses, (ctx.gradient,) = _through_chunks(head, targets, hidden, [], once, reduction="none")
        ctx.head = head
        if trained:
            ctx.save_for_backward(targets, hidden, *trained)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, coefficients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.saved_tensors:
            targets, hidden, *trained = ctx.saved_tensors
            differentiates = ctx.needs_input_grad[2]
            _, gradients = _through_chunks(ctx.head, targets, hidden, trained, differentiates, coefficients)
            of = zip(gradients, (hidden, *trained), strict=True)
            return None, None, *(None if new is None else new.to(tensor.dtype) for new, tensor in of)
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "the backward pass of this loss can run only once: it scales in place"
        return None, None, gradient.mul_(coefficients[:, None])


def _through_chunks(
    head: _Head,
    targets: torch.Tensor,
    hidden: torch.Tensor,
    trained: Sequence[torch.Tensor],
    differentiate_hidden: bool = False,
    coefficients: torch.Tensor | None = None,
    reduction: Literal["sum", "none"] = "sum",
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the loss, summed or (n,), its gradient for `hidden` in the dtype of `hidden`, and its gradient for each of
    `trained` in float32: both of the sum, each token's loss times its coefficient where there are `coefficients`."""
    loss = torch.zeros(() if reduction == "sum" else len(hidden), device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if differentiate_hidden else None
    sums: list[torch.Tensor | None] = [None] * len(trained)
    size = max(1, chunk_rows(len(hidden), head.vocabulary, head.number))
    for start in range(0, len(hidden), size):
        rows = slice(start, min(start + size, len(hidden)))
        add_chunk(head, rows, targets, hidden, grad_hidden, trained, loss, sums, coefficients)
    return loss, [grad_hidden, *sums]


def add_chunk(
    head: _Head,
    rows: slice,
    targets: torch.Tensor,
    hidden: torch.Tensor,
    grad_hidden: torch.Tensor | None,
    trained: Sequence[torch.Tensor],
    loss: torch.Tensor,
    sums: list[torch.Tensor | None],
    coefficients: torch.Tensor | None = None,
) -> None:
    """Add some rows' loss and gradients to `loss` (or write each row's, where it has one number per row) and `sums`,
    and write the gradient of these rows of `hidden`; nothing else of the chunk stays in memory, so that the next chunk
    has as much free."""
    states = hidden[rows].detach().requires_grad_(grad_hidden is not None)
    weights = None if coefficients is None else coefficients[rows]
    chunk_loss, gradients = _chunk(head, targets[rows], states, trained, weights, "none" if loss.dim() else "sum")
    if loss.dim():
        loss[rows] = chunk_loss
    else:
        loss += chunk_loss
    if grad_hidden is not None:
        grad_hidden[rows].copy_(gradients.pop(0))
    # Gradients of many chunks are summed: in 16 bits the later ones would be rounded away.
    sums[:] = [new.float() if old is None else old.add_(new) for old, new in zip(sums, gradients, strict=True)]


def _chunk(
    head: _Head,
    targets: torch.Tensor,
    hidden: torch.Tensor,
    trained: Sequence[torch.Tensor],
    coefficients: torch.Tensor | None,
    reduction: Literal["sum", "none"],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of one chunk and its gradients: for `hidden` if it requires one, then for each of `trained`."""
    inputs = [*([hidden] if hidden.requires_grad else []), *trained]
    with torch.set_grad_enabled(bool(inputs)):
        logits = head(hidden)
    # For a view that was overwritten, torch would create the gradient again, in another tensor of its size.
    edge = get_gradient_edge(logits) if inputs else None
    loss = cross_entropy_(logits.detach(), targets, bool(inputs), reduction)
    if edge is None:
        return loss, []
    if coefficients is not None:
        logits.detach().mul_(coefficients[:, None])
    try:
        return loss, list(torch.autograd.grad([edge], inputs, [logits.detach()]))
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise ModelError(
            f"{type(head.causal_lm).__name__} needs its logits for their gradient, which overwrites them",
            code="E5108",
            field="speed.chunked_loss",
            help="set speed.chunked_loss: false",
        ) from error


def cross_entropy_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    differentiate: bool = True,
    reduction: Literal["sum", "none"] = "sum",
) -> torch.Tensor:
    """Return the cross-entropy in nats of `logits` (n, vocabulary), summed, 0-d, or of each row, (n,); and overwrite
    the logits with its gradient, softmax − one-hot, or without `differentiate` with useless values.

    The arithmetic of 16-bit logits is done in float32, and the gradient is rounded once; other dtypes keep theirs. For
    16-bit logits float32 copies of `LOSS_TILE` rows are allocated; otherwise nothing of the logits' size is. Softmax
    can run in place: its kernels know a row's maximum and sum before they write, and write each number where it was
    read (aten/src/ATen/native/SoftMaxKernel.cpp in cpu, SoftMax.cu in cuda). The operators themselves are called,
    `torch._softmax`: `torch.softmax` allocates a temporary tensor and copies it (2.13).

    Args:
        targets: (n,) int64; every one counts.
    """
    targets = targets[:, None]
    if logits.dtype not in (torch.float16, torch.bfloat16):
        target_log_probs = torch._log_softmax(logits, -1, False, out=logits).gather(1, targets)
        if differentiate:
            logits.exp_()
    else:
        target_log_probs = torch.empty(targets.shape, device=logits.device)
        for start in range(0, len(logits), LOSS_TILE):
            tile, target, out = (tensor[start : start + LOSS_TILE] for tensor in (logits, targets, target_log_probs))
            exact = tile.float()
            torch.gather(torch._log_softmax(exact, -1, False, out=exact), 1, target, out=out)
            if differentiate and capability_of(logits) is None:
                tile.copy_(exact.exp_())  # a CPU's softmax rounds twice in 16 bits, and is slower
            elif differentiate:
                torch._softmax(tile, -1, False, out=tile)
            del exact  # before the next tile allocates its own
    if differentiate:
        # expm1 and not p − 1: p has been rounded to 16 bits, and near 1 the difference would lose its digits.
        logits.scatter_(1, targets, target_log_probs.expm1().to(logits.dtype))
    return -target_log_probs.sum() if reduction == "sum" else -target_log_probs.squeeze(1)
