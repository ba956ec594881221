"""Linear layers: fused outputs, shards, and the packed product."""

import pytest
import torch

from numerics import assert_close
from octavo.errors import ConfigError
from octavo.layers.embedding import Embedding
from octavo.layers.linear import WHOLE, Linear, Placement, Shard, column_linear, row_linear
from octavo.quant import packing
from octavo.quant.base import Unquantised

SIZES = {"q": 10, "k": 4, "v": 4}


def placement(shard: Shard = WHOLE, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(Unquantised(), dtype, torch.device("cpu"), shard)


def fill(linear: Linear, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    filled = {}
    for name, view in linear.weight_map():
        view.copy_(torch.randn(view.shape))
        filled[name] = view.clone()
    return filled


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_fused_outputs_are_the_separate_ones_side_by_side(
    tokens: int, dtype: torch.dtype, bias: bool, packed: bool
) -> None:
    linear = column_linear(7, SIZES, bias, placement(dtype=dtype))
    weights = fill(linear)
    suffixes = ("weight", "bias") if bias else ("weight",)
    assert weights.keys() == {f"{name}.{suffix}" for name in SIZES for suffix in suffixes}
    if packed:
        linear.finish_loading()
    x = torch.randn(tokens, 7).to(dtype)
    separate = []
    for name, rows in SIZES.items():
        weight = weights[f"{name}.weight"]
        assert weight.shape == (rows, 7)
        product = x.double() @ weight.double().T
        separate.append(product + weights[f"{name}.bias"].double() if bias else product)
    assert_close("output", linear(x), torch.cat(separate, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_this_build_of_torch_packs_on_a_cpu(dtype: torch.dtype) -> None:
    """The operators are not a documented interface; this is where their loss would show."""
    weight = torch.randn(33, 17).to(dtype)
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert not packing.can_pack(weight)
        return
    assert packing.can_pack(weight)
    x = torch.randn(5, 17).to(dtype)
    product = packing.multiply(x, packing.pack(weight), None)
    assert_close("product", product, x.double() @ weight.double().T)


def test_weights_elsewhere_are_not_packed() -> None:
    assert not packing.can_pack(torch.empty(4, 4, dtype=torch.float16))
    assert not packing.can_pack(torch.empty(4, 4, device="meta"))


def test_shards_of_a_column_linear_are_parts_of_the_output() -> None:
    whole = column_linear(6, SIZES, True, placement())
    weights = fill(whole)
    x = torch.randn(3, 6)
    expected = {}
    for name, part in zip(SIZES, whole(x).split(list(SIZES.values()), dim=1), strict=True):
        expected[name] = part
    for rank in range(2):
        shard = column_linear(6, SIZES, True, placement(Shard(rank, 2)))
        for name, view in shard.weight_map():
            view.copy_(weights[name].chunk(2)[rank])
        parts = shard(x).split([rows // 2 for rows in SIZES.values()], dim=1)
        for name, part in zip(SIZES, parts, strict=True):
            assert_close(f"{name} of shard {rank}", part, expected[name].chunk(2, dim=1)[rank])


def test_shards_of_a_row_linear_add_up() -> None:
    whole = row_linear(6, 5, "o", True, placement())
    weights = fill(whole)
    x = torch.randn(3, 6)
    total = torch.zeros(3, 5)
    for rank in range(2):
        shard = row_linear(6, 5, "o", True, placement(Shard(rank, 2)))
        for name, view in shard.weight_map():
            view.copy_(weights[name].chunk(2, dim=1)[rank] if name == "o.weight" else weights[name])
        total += shard(x.chunk(2, dim=1)[rank])
    assert_close("sum of the shards", total, whole(x))


def test_a_shard_must_divide_the_outputs() -> None:
    with pytest.raises(ConfigError, match=r"'tensor_parallel_size' is 3; .* the outputs of q, 10"):
        column_linear(6, SIZES, False, placement(Shard(0, 3)))


def test_a_tied_head_multiplies_by_the_embedding() -> None:
    embedding = Embedding(11, 6, "model.embed_tokens", placement())
    ((name, weight),) = embedding.weight_map()
    assert name == "model.embed_tokens.weight"
    weight.copy_(torch.randn(11, 6))
    token_ids = torch.tensor([3, 0, 10])
    assert torch.equal(embedding(token_ids), weight[[3, 0, 10]])
    embedding.become_head()
    hidden = torch.randn(2, 6)
    logits = hidden.double() @ weight.double().T
    assert_close("logits", embedding.logits(hidden), logits)
    ids, values = embedding.best(hidden, 3)
    assert torch.equal(ids, logits.topk(3).indices)
    assert_close("best", values, logits.topk(3).values)
