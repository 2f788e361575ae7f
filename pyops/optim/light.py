"""The memory-light form: gradients are folded into the momentum while backward runs.

The momentum average is the only gradient-sized tensor that stays: a hook on each parameter adds the fresh
gradient to it as soon as autograd has accumulated it, and lets it stand in for ``p.grad`` until the step.
After the step ``p.grad`` is None again, so that clearing gradients between step and backward, by whomever,
has nothing to clear.

With m the average and g_a the gradients of the backward passes between two steps, the first pass does
``m <- m + (1 - momentum) (g_1 - m)`` and each later one ``m <- m + (1 - momentum) g_a``: the plain form's
``m <- momentum m + (1 - momentum) sum_a g_a`` without ever holding the sum.

What has been folded cannot be taken out again. Where a training loop would need that, an error says so; only
after a non-finite backward the finite gradients stay, as one more pass of the next step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyops.optim.base import all_ranks, finite, is_dtensor, like_weight, local

if TYPE_CHECKING:
    from pyops.optim.scion import Scion

CARRIED = None  # in place of a mark: folded before a step that was skipped
# Parameter -> reference to the folder that has it; not an attribute, which would end up in a pickled model.
OWNERS = WeakIdKeyDictionary()
REMEDY = (
    'light="deferred" keeps gradients apart until the step, at the price of one more gradient set until then'
)


def mark(t: Tensor) -> int | float:
    """What a change in place changes: the version, or a DTensor's sum, as its versions miss foreach ops."""
    if not is_dtensor(t):
        return t._version
    part = local(t)
    return part.sum(dtype=torch.promote_types(part.dtype, torch.float32)).item()


class Folder:
    """Folds gradients for one optimizer and knows which parameters are between backward and step."""

    def __init__(self, owner: Scion):
        self._owner = weakref.proxy(owner)
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._hooked: set[Tensor] = set()
        self._pending: dict[
            Tensor, int | float | None
        ] = {}  # folded since the last step -> its mark, or CARRIED
        self._nonfinite: set[Tensor] = set()
        self._open: set[Tensor] = set()  # standing-in buffer taken out of p.grad, fresh gradient to come
        self._touched: list[Tensor] = []

    def watch(self, group: dict[str, Any]) -> None:
        """Hooks the parameters of a group; the last optimizer that was given a parameter has it."""
        reference = weakref.ref(self)
        for p in group["params"]:
            self._groups[p] = group
            OWNERS[p] = reference
            if group["light"] is not True or p in self._hooked or not p.requires_grad:
                continue
            self._hooked.add(p)
            parameter = weakref.ref(p)

            def before(_: Tensor, parameter=parameter, reference=reference) -> None:
                p, folder = parameter(), reference()
                if p is not None and folder is not None and OWNERS.get(p) is reference:
                    folder._before(p)

            def after(p: Tensor, reference=reference) -> None:
                folder = reference()
                if folder is not None and OWNERS.get(p) is reference:
                    folder._after(p)

            p.register_hook(before)
            p.register_post_accumulate_grad_hook(after)

    def _buffer(self, p: Tensor) -> Tensor | None:
        return self._owner.state[p].get("momentum_buffer")

    def _before(self, p: Tensor) -> None:
        """Takes the buffer out of p.grad, so that autograd leaves the fresh gradient there by itself."""
        if self._nonfinite and p.grad is None:
            self._carry_dropped()
        if p not in self._pending or p in self._nonfinite:
            return
        self._check(p)
        p.grad = None
        self._open.add(p)

    def _after(self, p: Tensor) -> None:
        if p in self._pending and p not in self._open and p not in self._nonfinite:
            if p.grad is self._buffer(p):
                raise RuntimeError(
                    "Scion(light=True): fully_shard has added a second backward pass onto the momentum; "
                    f"with gradient accumulation under FSDP2 {REMEDY}"
                )
            if self._pending[p] is not CARRIED:
                raise self._dropped()
        self._open.discard(p)
        assert p.grad is not None
        self._fold(p, p.grad, fresh=True)

    def _fold(self, p: Any, g: Any, fresh: bool) -> bool:
        """m <- m + (1 - momentum) (g - m), without the last m from the second pass on; False for non-finite
        g.

        A fresh gradient comes from autograd, still scaled for mixed precision, and is ours to overwrite.
        """
        if g.layout != torch.strided:
            raise RuntimeError(f"Scion got a sparse gradient ({g.layout}): give it dense ones, sparse=False")
        if g.requires_grad:
            raise RuntimeError("Scion(light=True) cannot fold the gradients of backward(create_graph=True)")
        with torch.no_grad():
            if fresh and self._owner.grad_scaler is not None:
                local(g).div_(self._owner.grad_scaler.scale(torch.ones((), device=g.device)))
            if not finite([g])[0]:
                self._nonfinite.add(p)
                return False
            if is_dtensor(g) and g.placements != p.placements:
                g = g.redistribute(placements=p.placements)
            weight, buffer = 1 - self._groups[p]["momentum"], self._buffer(p)
            if buffer is None:
                # FSDP2 hands out views of one tensor: in place, they would keep it alive as a whole.
                buffer = like_weight(g, p).mul_(weight) if fresh and not is_dtensor(g) else g * weight
                self._owner.state[p]["momentum_buffer"] = buffer
            elif p in self._pending:
                local(buffer).add_(local(g), alpha=weight)
            else:
                local(buffer).lerp_(local(g).to(buffer.dtype), weight)
            p.grad = buffer
        self._pending[p] = mark(buffer)
        if not is_dtensor(p):
            self._settle_later(p)
        return True

    def _settle_later(self, p: Tensor) -> None:
        """Marks the buffer again when backward has ended: DDP writes the average over ranks into p.grad."""
        engine = torch.autograd.Variable._execution_engine
        if not self._touched and torch._C._current_graph_task_id() != -1:
            # Queued from the first callback, this one runs after those that DDP queues during backward.
            engine.queue_callback(lambda: engine.queue_callback(self._settle))
        self._touched.append(p)

    def _settle(self) -> None:
        for p in self._touched:
            buffer = self._buffer(p)
            if p not in self._pending or p.grad is not buffer or buffer is None:
                continue
            if mark(buffer) != self._pending[p] and not finite([buffer])[0]:
                raise RuntimeError(
                    "Scion(light=True): averaging over ranks brought NaN or Inf into the momentum, which is "
                    f"lost with it: restart from a checkpoint; {REMEDY}"
                )
            self._pending[p] = mark(buffer)
        self._touched = []

    def _check(self, p: Tensor) -> None:
        """Raises where p.grad is no longer what was folded."""
        buffer, known = self._buffer(p), self._pending[p]
        if known is CARRIED and p.grad is None:
            return
        if p in self._open and p.grad is None:  # torch.autograd.grad runs the first hook and not the second
            p.grad = buffer
            self._open.discard(p)
        if p.grad is not buffer:
            raise self._dropped()
        assert buffer is not None
        if mark(buffer) != known:
            raise RuntimeError(
                "Scion(light=True): a gradient was changed in place between backward and step, by "
                "clip_grad_norm_, a division, model.zero_grad(set_to_none=False) or the like. It is the "
                "momentum average, whose past would change with it. The step does not depend on the length "
                f"of the gradient, so clipping can often go; where it cannot, {REMEDY}"
            )

    def _dropped(self) -> RuntimeError:
        return RuntimeError(
            "Scion(light=True): gradients were cleared or replaced between backward and step, but they are "
            "in the momentum already and cannot be taken out. Clear them after the step or before backward; "
            f"{REMEDY}"
        )

    def _carry_dropped(self) -> None:
        """After a non-finite backward, what its caller cleared counts towards the next step."""
        for p in self._pending:
            if p.grad is None:
                self._pending[p] = CARRIED
        self._nonfinite = {p for p in self._nonfinite if p.grad is not None}

    def agree(self) -> None:
        """Under sharding, a parameter with a non-finite part on any rank is non-finite on all."""
        spread = [p for p, group in self._groups.items() if group["light"] is True and is_dtensor(p)]
        good = all_ranks([p not in self._nonfinite for p in spread], spread)
        self._nonfinite |= {p for p, fine in zip(spread, good, strict=True) if not fine}

    def rescale(self, scale: float) -> None:
        """Takes back a division of every p.grad by the loss scale, which folding has done already."""
        with torch.no_grad():
            for p, known in self._pending.items():
                if known is not CARRIED:
                    self._check(p)
                    buffer = self._owner.state[p]["momentum_buffer"].mul_(scale)
                    self._pending[p] = mark(buffer)

    def gradient(self, p: Tensor) -> Tensor | None:
        """What p's step reads: the buffer, or a gradient that no hook has folded; None to leave p alone."""
        if p in self._nonfinite:
            return p.grad if self._groups[p]["error_if_nonfinite"] else None
        if p in self._pending and not (self._pending[p] is CARRIED and p.grad is not None):
            self._check(p)
        return p.grad

    def source(self, p: Tensor, g: Tensor) -> Tensor | None:
        """The momentum average with g in it; None where g is not finite."""
        if g is self._buffer(p):
            return g
        return self._buffer(p) if self._fold(p, g, fresh=False) else None

    def release(self) -> None:
        """After a step: nothing is pending, but for what a non-finite gradient kept from its step."""
        for p, group in self._groups.items():
            if group["light"] is True:
                p.grad = None
        kept = [p for p, known in self._pending.items() if known is CARRIED or p in self._nonfinite]
        self._pending = dict.fromkeys(kept, CARRIED)
        self._nonfinite, self._touched = set(), []

    def skip(self) -> None:
        """A step that was not taken: what has been folded counts towards the next one."""
        self._pending = dict.fromkeys(self._pending, CARRIED)
        self.release()

    def clear(self) -> None:
        """Gradients are to be thrown away."""
        if not self.waiting():
            return
        if not self._nonfinite:
            raise self._dropped()
        self.skip()

    def waiting(self) -> bool:
        """Whether gradients were folded that no step has used, other than those of skipped steps."""
        return bool(self._nonfinite) or any(known is not CARRIED for known in self._pending.values())

    def forget(self) -> None:
        """The state was replaced."""
        self._pending, self._nonfinite, self._touched, self._open = {}, set(), [], set()
