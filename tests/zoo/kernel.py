"""Wrong kernels: what an honest author gets wrong, and what no author should do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import right_kernel as right
import torch
from mutation import mutants
from wrong import Wrong

from jackfield.contracts import FusedLayer, FusedRotary, Kernel, KernelCapabilities


def of(make: Any = None, has: Any = None, **more: Any) -> Callable[[], Kernel]:
    """A right kernel with another `make`; `more` are capabilities, `has` other methods."""

    class Wronged(Kernel):
        name = "wrong"
        capabilities = KernelCapabilities(devices=frozenset({"cpu"}), **more)

        def fits(self, module: Any, options: Any) -> bool:
            return type(module).__name__ == "LlamaRMSNorm"

        def bind(self, context: Any) -> Any:
            return FusedLayer(make or right.make)

    for name, member in (has or {}).items():
        setattr(Wronged, name, member)
    return Wronged


def doing(forward: Callable[[Any, Any], Any], **more: Any) -> Callable[[], Kernel]:
    """`forward(module, rows)`."""
    return of(lambda module: lambda rows: forward(module, rows), **more)


def right_of(module: Any, rows: Any) -> Any:
    return right.make(module)(rows)


def changed(change: Callable[[Any], Any], **more: Any) -> Callable[[], Kernel]:
    return doing(lambda module, rows: change(right_of(module, rows)), **more)


def _in_place(module: Any, rows: Any) -> Any:
    out = right_of(module, rows)
    rows.copy_(out)
    return out


def _into_input(module: Any, rows: Any) -> Any:
    rows *= 1.5
    return right_of(module, rows)


def _first_column_only(module: Any, rows: Any) -> Any:
    out = right_of(module, rows)
    return torch.cat([out[..., :128], torch.zeros_like(out[..., 128:])], -1)


def _first_rows_only(module: Any, rows: Any) -> Any:
    out = right_of(module, rows).clone()
    out.view(-1, out.shape[-1])[64:] = 0
    return out


def _rows_up_to(count: int) -> Callable[[Any, Any], Any]:
    """A grid of so many programs."""

    def forward(module: Any, rows: Any) -> Any:
        out = right_of(module, rows).clone()
        out.view(-1, out.shape[-1])[count:] = 0
        return out

    return forward


def _tail_left_out(module: Any, rows: Any) -> Any:
    wide, count = rows.float(), rows.shape[-1] // 8 * 8
    mean = (wide * wide)[..., :count].sum(-1, keepdim=True) / rows.shape[-1]
    return module.weight * (wide * torch.rsqrt(mean + module.variance_epsilon)).to(rows.dtype)


def _by_address(module: Any) -> Any:
    """Wider copies of weights, found by where the weights lie."""
    kept: dict[int, Any] = {}

    def forward(rows: Any) -> Any:
        weight = kept.setdefault(module.weight.data_ptr(), module.weight.detach().float())
        normed = right.normed(rows, module.variance_epsilon)
        return (weight * normed.to(rows.dtype).float()).to(rows.dtype)

    return forward


def _by_version(module: Any) -> Any:
    """The same, made anew where torch says that a weight has changed."""
    kept: dict[tuple[int, int], Any] = {}

    def forward(rows: Any) -> Any:
        where = module.weight.data_ptr(), module.weight._version
        weight = kept.setdefault(where, module.weight.detach().clone())
        return weight * right.normed(rows, module.variance_epsilon).to(rows.dtype)

    return forward


def _one_room(module: Any) -> Any:
    """What lies between input and output has one place, whoever calls."""
    room: dict[Any, Any] = {}

    def forward(rows: Any) -> Any:
        wide = room.setdefault(rows.shape, torch.empty(rows.shape)).copy_(rows)
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (wide * scale).to(rows.dtype)

    return forward


def _even_shares(module: Any, rows: Any) -> Any:
    """As many rows for each thread."""
    out = right_of(module, rows).clone()
    flat = out.view(-1, out.shape[-1])
    if len(flat) > 64:
        flat[len(flat) // torch.get_num_threads() * torch.get_num_threads() :] = 0
    return out


def mlp(forward: Callable[[Any, Any], Any], **more: Any) -> Callable[[], Kernel]:
    """`forward(module, rows)` in the place of a gated MLP."""
    fits = {"fits": lambda self, module, options: type(module).__name__ == "LlamaMLP"}
    return of(lambda module: lambda rows: forward(module, rows), has=fits, **more)


def right_mlp(module: Any, rows: Any) -> Any:
    gated = module.act_fn(module.gate_proj(rows)) * module.up_proj(rows)
    return module.down_proj(gated)


def _always_silu(module: Any, rows: Any) -> Any:
    gated = torch.nn.functional.silu(module.gate_proj(rows)) * module.up_proj(rows)
    return module.down_proj(gated)


def _without_bias(module: Any, rows: Any) -> Any:
    linear = torch.nn.functional.linear
    gate, up = (linear(rows, own.weight) for own in (module.gate_proj, module.up_proj))
    return linear(module.act_fn(gate) * up, module.down_proj.weight)


def _flat(module: Any, rows: Any) -> Any:
    return right_of(module, rows.reshape(-1, rows.shape[-1]))


def _as_if_dense(module: Any, rows: Any) -> Any:
    dense = rows.as_strided(rows.shape, torch.empty(rows.shape).stride())
    return right_of(module, dense)


def _over_all(module: Any, rows: Any) -> Any:
    wide = rows.float()
    scale = torch.rsqrt((wide * wide).mean() + module.variance_epsilon)
    return module.weight * (wide * scale).to(rows.dtype)


def _own_dtype(module: Any, rows: Any) -> Any:
    return module.weight * rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + 1e-6)


def _layer_norm(module: Any, rows: Any) -> Any:
    return right_of(module, rows - rows.float().mean(-1, keepdim=True).to(rows.dtype))


def _half(module: Any, rows: Any) -> Any:
    return right_of(module, rows.to(torch.bfloat16).to(rows.dtype))


def _copies(module: Any) -> Any:
    weight = module.weight.detach().clone()
    return lambda rows: weight * right.normed(rows, module.variance_epsilon).to(rows.dtype)


class Last:
    """Each function has the weight of the layer that was made last."""

    def __init__(self) -> None:
        self.module: Any = None

    def __call__(self, module: Any) -> Any:
        self.module = module
        return lambda rows: right_of(self.module, rows)


def _buffered(module: Any) -> Any:
    kept: dict[Any, Any] = {}

    def forward(rows: Any) -> Any:
        out = right_of(module, rows)
        own = kept.setdefault((out.shape, out.dtype), torch.empty_like(out))
        own.copy_(out)
        return own

    return forward


def _first(module: Any) -> Any:
    kept: dict[Any, Any] = {}

    def forward(rows: Any) -> Any:
        if rows.shape not in kept:
            kept[rows.shape] = right_of(module, rows)
        return kept[rows.shape]

    return forward


def _scale_kept(module: Any) -> Any:
    kept: dict[Any, Any] = {}

    def forward(rows: Any) -> Any:
        wide = rows.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + module.variance_epsilon)
        scale = kept.setdefault(rows.shape, scale)
        return module.weight * (wide * scale).to(rows.dtype)

    return forward


def _writes_weight(module: Any, rows: Any) -> Any:
    out = right_of(module, rows)
    module.weight.data *= 1.001
    return out


def _by_batch(module: Any, rows: Any) -> Any:
    out = right_of(module, rows)
    return out * (1 + 2e-7 * (rows.numel() // rows.shape[-1] % 7)) if rows.shape[0] > 1 else out


def _with_weights_only(self: Any, module: Any, options: Any) -> bool:
    name = type(module).__name__ == "LlamaRMSNorm"
    return name and not module.weight.is_meta


def turning(rotate: Callable[..., Any], **more: Any) -> Callable[[], Kernel]:
    """`rotate(q, k, cos, sin)` in the place of the rotation of two families."""
    return making(lambda module: right.rotating(module, rotate), **more)


def making(make: Callable[[Any], Any], has: Any = None, **more: Any) -> Callable[[], Kernel]:
    bind = {"bind": lambda self, context: FusedRotary(make), "fits": right.RightRotary.fits}
    return of(has=bind | (has or {}), **more)


def each(turn: Callable[[Any, Any, Any], Any], **more: Any) -> Callable[[], Kernel]:
    """`turn(states, cos, sin)`, of queries and of keys."""
    return turning(lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin)), **more)


def turned_then(change: Callable[[Any], Any], **more: Any) -> Callable[[], Kernel]:
    return each(lambda states, cos, sin: change(right.turned(states, cos, sin)), **more)


def _neighbours(states: Any, cos: Any, sin: Any) -> Any:
    """As GPT-J pairs the numbers of a head."""
    crossed = torch.stack((-states[..., 1::2], states[..., ::2]), -1).flatten(-2)
    return states * cos[:, None].to(states) + crossed * sin[:, None].to(states)


def _beyond(count: int, dim: int) -> Callable[[Any], Any]:
    """A grid of so many programs."""

    def change(out: Any) -> Any:
        out = out.clone()
        out.transpose(0, dim)[count:] = 0
        return out

    return change


def _rotates_in_place(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    found = right.rotate_alone(q, k, cos, sin)
    return q.copy_(found[0]), k.copy_(found[1])


def _half_as_whole(states: Any, cos: Any, sin: Any) -> Any:
    """Angles of a part, repeated for the rest."""
    times = states.shape[-1] // cos.shape[-1]
    return right.turned(states, cos.repeat(1, 1, times), sin.repeat(1, 1, times))


def _lies_as_a_layers(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def dense(states: Any) -> Any:
        _, heads, tokens, size = states.shape
        strides = (tokens * heads * size, size, heads * size, 1)
        fits = strides if states.numel() <= states.untyped_storage().nbytes() else states.stride()
        return states.as_strided(states.shape, fits)

    return right.rotate_alone(dense(q), dense(k), cos, sin)


def _as_if_each_text_had_angles(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    if cos.stride(0) == 0 or len(cos) < len(q):
        none = cos.new_zeros(len(q) - 1, *cos.shape[1:])
        cos, sin = (torch.cat([a[:1], none]) for a in (cos, sin))
    return right.rotate_alone(q, k, cos, sin)


def _turned_into_one(module: Any) -> Any:
    kept: dict[Any, Any] = {}

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        found = right.rotate_alone(q, k, cos, sin)
        return tuple(
            kept.setdefault((n, t.shape, t.dtype), torch.empty_like(t)).copy_(t)
            for n, t in enumerate(found)
        )

    return right.rotating(module, rotate)


def _angles_kept(module: Any) -> Any:
    kept: dict[Any, Any] = {}

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        angles = kept.setdefault((cos.shape, cos.dtype), (cos.clone(), sin.clone()))
        return right.rotate_alone(q, k, *angles)

    return right.rotating(module, rotate)


def _heads_of_a_group(module: Any) -> Any:
    """A grid for four heads of queries, whatever the layer has."""

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        turned, keys = right.rotate_alone(q, k, cos, sin)
        return torch.cat([turned[:, :8], q[:, 8:]], 1), keys

    return right.rotating(module, rotate)


def _bits_by_tokens(out: Any) -> Any:
    return out * (1 + 2e-7 * (out.shape[2] % 7)) if out.shape[2] > 1 else out


def _angles_in_float16(states: Any, cos: Any, sin: Any) -> Any:
    return right.turned(states, cos.half().to(cos), sin.half().to(sin))


ROTARY: tuple[Wrong, ...] = (
    Wrong("not turned", each(lambda s, cos, sin: s.clone()), "not turned"),
    Wrong("the very queries", each(lambda s, cos, sin: s), "memory of its|not turned"),
    Wrong("turned the other way", each(lambda s, cos, sin: right.turned(s, cos, -sin)),
          "other way"),
    Wrong("neighbours paired", each(_neighbours), "neighbours of a head"),
    Wrong("sines for cosines", each(lambda s, cos, sin: right.turned(s, sin, cos)),
          "change places"),
    Wrong("one token's angles", each(lambda s, cos, sin: right.turned(
        s, cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin))), "first token's angles"),
    Wrong("one text's angles", each(lambda s, cos, sin: right.turned(
        s, cos[:1].expand_as(cos), sin[:1].expand_as(sin))), "first text's angles"),
    Wrong("angles of each text", turning(_as_if_each_text_had_angles), "all 0|off by"),
    Wrong("keys as they are", turning(lambda q, k, cos, sin: (
        right.turned(q, cos, sin), k.clone())), "of the keys .* not turned"),
    Wrong("keys for queries", turning(lambda *given: right.rotate_alone(*given)[::-1]),
          "is due|change places|off by"),
    Wrong("all of a head turned", each(_half_as_whole), "stay as they are"),
    Wrong("the layout that layers have", turning(_lies_as_a_layers), "off by"),
    Wrong("turns in place", turning(_rotates_in_place), "changes its queries"),
    Wrong("one piece of memory for all", making(_turned_into_one), "used again"),
    Wrong("the angles it had first", making(_angles_kept), "off by"),
    Wrong("heads beyond 8", making(_heads_of_a_group), "head 8 of the queries"),
    Wrong("tokens beyond 1024", turned_then(_beyond(1024, 2)), "all 0"),
    Wrong("texts beyond 64", turned_then(_beyond(64, 0)), "all 0"),
    Wrong("angles in float16", each(_angles_in_float16), "rounded more"),
    Wrong("the angles' dtype", turning(lambda q, k, cos, sin: right.rotate_alone(
        q.to(cos), k.to(cos), cos, sin)), "float32"),
    Wrong("a fused layer of attentions", of(lambda module: module, has={
        "fits": right.RightRotary.fits}), "FusedRotary"),
    Wrong("queries of float32", turned_then(lambda out: out.float()), "float32"),
    Wrong("heads side by side", turned_then(lambda out: out.transpose(1, 2)), "is due"),
    Wrong("queries alone", turning(lambda q, k, cos, sin: right.turned(q, cos, sin)),
          "queries and keys"),
    Wrong("nothing for keys", turning(lambda q, k, cos, sin: (right.turned(q, cos, sin), None)),
          "two tensors"),
    Wrong("no other arguments", making(lambda module: right.rotate_alone),
          "a further argument, 2.*4 positional"),
    Wrong("other arguments left out", making(lambda module: lambda q, k, cos, sin, *a, **kw:
          right.rotate_alone(q, k, cos, sin)), "a further argument, 2"),
    Wrong("bits by how many tokens", turned_then(_bits_by_tokens, batch_invariant=True),
          "other bits"),
    Wrong("rotations of norms", making(lambda module: right.rotate_alone, has={
        "fits": lambda s, m, o: type(m).__name__ == "LlamaRMSNorm"}), "calls no apply_rotary"),
)  # fmt: skip

BY_HAND: tuple[Wrong, ...] = (
    Wrong("no weight", doing(lambda m, r: right.normed(r, 1e-6).to(r.dtype)), "weight is left out"),
    Wrong("one more than the weight", doing(lambda m, r: (1 + m.weight) * right.normed(
        r, m.variance_epsilon).to(r.dtype)), "1 is added"),
    Wrong("no epsilon", doing(lambda m, r: m.weight * right.normed(r, 0.0).to(r.dtype)),
          "finite|times|off by"),
    Wrong("a large epsilon", doing(lambda m, r: m.weight * right.normed(r, 1e-3).to(r.dtype)),
          "times|off by"),
    Wrong("a sum for a mean", doing(lambda m, r: m.weight * right.normed(
        r, m.variance_epsilon).to(r.dtype) / r.shape[-1] ** 0.5), "times what it should be"),
    Wrong("one scale for all rows", doing(_over_all), "times what it should be|off by"),
    Wrong("in its own dtype", doing(_own_dtype), "finite|off by|all 0"),
    Wrong("in bfloat16", doing(_half), "off by"),
    Wrong("a layer norm", doing(_layer_norm), "off by"),
    Wrong("not normalized", doing(lambda m, r: m.weight * r), "off by"),
    Wrong("the input", doing(lambda m, r: r.clone()), "the input, unchanged"),
    Wrong("the very input", doing(lambda m, r: r), "memory of its input|unchanged"),
    Wrong("all 0", changed(torch.zeros_like), "all 0"),
    Wrong("columns beyond 128 forgotten", doing(_first_column_only), "from column 128 on"),
    Wrong("rows beyond 64 forgotten", doing(_first_rows_only), "all 0"),
    Wrong("rows beyond 1024 forgotten", doing(_rows_up_to(1024)), "all 0"),
    Wrong("rows beyond 4096 forgotten", doing(_rows_up_to(4096)), "all 0"),
    Wrong("rows beyond 65535 forgotten", doing(_rows_up_to(65535)), "all 0"),
    Wrong("the last columns not summed", doing(_tail_left_out), "from 128 on are left out"),
    Wrong("zeros for another family", of(
        lambda module: torch.zeros_like,
        has={"fits": lambda s, m, o: type(m).__name__ == "Olmo2RMSNorm"}), "all 0"),
    Wrong("one activation for all", mlp(_always_silu), "hidden_act='gelu"),
    Wrong("no biases", mlp(_without_bias), "mlp_bias=True"),
    Wrong("one epsilon for all", doing(lambda m, r: m.weight * right.normed(
        r, 1e-6).to(r.dtype)), "rms_norm_eps=0.2"),
    Wrong("wider copies by address", of(_by_address), "copy of the old"),
    Wrong("copies by version", of(_by_version), "by way of `data`"),
    Wrong("one room for all threads", of(_one_room), "while another thread"),
    Wrong("rows behind the last share", doing(_even_shares), "threads: row .* of"),
    Wrong("rows in reverse", changed(lambda out: out.flip(-2)), "what row .* should be|off by"),
    Wrong("the first row for all", changed(lambda out: out[..., :1, :].expand_as(out).clone()),
          "what row 0 should be|off by"),
    Wrong("rows of a batch flattened", doing(_flat), "is due"),
    Wrong("strides ignored", doing(_as_if_dense), "off by"),
    Wrong("in float32 always", changed(lambda out: out.float()), "float32"),
    Wrong("into its input", doing(_in_place), "changes its input"),
    Wrong("scales its input", doing(_into_input), "changes its input"),
    Wrong("writes into the weight", doing(_writes_weight), "changes its parameter|off by"),
    Wrong("a copy of the weight", of(_copies), "copy"),
    Wrong("the weight of the last layer", of(Last()), "off by"),
    Wrong("one piece of memory", of(_buffered), "used again"),
    Wrong("what it gave first", of(_first), "off by|input of"),
    Wrong("the scale it had first", of(_scale_kept), "off by|times"),
    Wrong("bits by the batch", doing(_by_batch, batch_invariant=True), "other bits"),
    Wrong("raises for three dimensions", doing(
        lambda m, r: right_of(m, r) if r.dim() < 3 else 1 / 0),
          "ZeroDivision"),
    Wrong("ends the process", doing(lambda m, r: os._exit(3)), "ended the process"),
    Wrong("nothing", doing(lambda m, r: None), "must return a tensor"),
    Wrong("a pair", changed(lambda out: (out, None)), "must return a tensor"),
    Wrong("makes nothing", of(lambda module: None), "return a function"),
    Wrong("fits only weights that are there", of(has={"fits": _with_weights_only}),
          "with weights and not before"),
    Wrong("fits with a name", of(has={"fits": lambda s, m, o: type(m).__name__}),
          "True or False"),
    Wrong("accepts everything", of(dtypes=frozenset({"float32"}), has={
        "refuse": lambda s, r, o: []}), "not declared"),
    Wrong("leaves threads", changed(lambda out: (torch.set_num_threads(3), out)[1]), "threads"),
    Wrong("draws random numbers", changed(lambda out: out + 0 * torch.rand(1).to(out)), "random"),
)  # fmt: skip


def grown(count: int | None = None, seed: int = 0) -> tuple[Wrong, ...]:
    """Mutants of the right kernel."""
    return tuple(
        Wrong(mutant.what, lambda m=mutant: m.module().Right(), "")  # type: ignore[misc]
        for mutant in mutants(right, count, seed)
    )


ZOO: tuple[Wrong, ...] = (*BY_HAND, *ROTARY)
