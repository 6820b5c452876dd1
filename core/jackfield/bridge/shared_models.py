"""What a model that several processes share needs of its backends: in each of them, a part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jackfield.bridge.footprint import numbers_of_a_token, weights_of
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.probe import probe
from jackfield.bridge.requirements import probed, shapes_by_layer
from jackfield.bridge.sharding import Shard, are_cut, around, sharded
from jackfield.contracts.requirements import BYTES, Requirements, Weight
from jackfield.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedConfig, PreTrainedModel


def part_of(config: PreTrainedConfig, shard: Shard) -> PreTrainedModel:
    """The model of `config` on the meta device, as `shard` has it. Raises PlanError."""
    return sharded(meta_model(config), shard)


def shared_out(config: PreTrainedConfig, needs: Requirements, shard: Shard) -> Requirements:
    """`needs` of the whole model, for what `shard` has of it. Raises PlanError.

    Sizes and shapes are taken from a model on the meta device that is cut as transformers will cut
    it, and from a step of it.
    """
    if why := needs.features.get("bidirectional_prefix"):
        raise PlanError(
            f"tp_size={shard.size} cannot run {needs.architecture}, which reads a prompt in both "
            f"directions ({why}): it says something else where processes share it; load it in one"
        )
    part = part_of(config, shard)
    whole, seen = probed(part), probe(part_of(config, shard))  # by its config: that of all of it
    size = shard.size if are_cut(needs, whole.calls, seen.calls, shard) else 1
    weights, layers = with_whole(weights_of(part), needs.weights), len(needs.layer_types)
    return replace(
        needs,
        tp_size=shard.size,
        expert_parallel=shard.experts,
        num_attention_heads=needs.num_attention_heads // size,
        num_key_value_heads=needs.num_key_value_heads // size,
        kv_numbers=seen.cached,
        **shapes_by_layer(seen.calls, layers),
        token_numbers=numbers_of_a_token(part),
        weights=weights,
        plain_matrices=needs.plain_matrices or _plain_matrices(part, weights, shard),
        weight_bytes=sum(w.numbers * BYTES[w.dtype or needs.dtype] for w in weights),
    )


def with_whole(own: Iterable[Weight], whole: Iterable[Weight]) -> tuple[Weight, ...]:
    """Weights of one process, which know what of `whole` they are a part of."""
    linear = {weight.name: weight.linear for weight in whole}
    return tuple(
        weight
        if weight.linear == linear[weight.name]
        else replace(weight, whole=linear[weight.name])
        for weight in own
    )


def _plain_matrices(part: PreTrainedModel, weights: tuple[Weight, ...], shard: Shard) -> str | None:
    """Which linear layer no quantizer may replace, since only transformers shares it so."""
    for weight in weights:
        path = weight.name.rpartition(".")[0]
        if weight.linear is not None and around(part, path, shard) is None:
            return f"transformers has a style of its own to share {path} among processes"
    return None
