"""Reference of `ops.kv_store`; see there for shapes."""

from torch import Tensor

from octavo_kernels import kv_format


def kv_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_rows: Tensor) -> None:
    head_size = k.shape[-1]
    news = [new.reshape(-1, head_size) for new in (k, v)]
    stored = slot_rows >= 0
    if not stored.all():  # some only pad the batch
        news, slot_rows = [new[stored] for new in news], slot_rows[stored]
    for new, cache in zip(news, (k_cache, v_cache), strict=True):
        if kv_format.is_quantised(cache.dtype):
            kv_format.store(new, cache, slot_rows)
        else:
            cache.view(-1, head_size).index_copy_(0, slot_rows, new)
