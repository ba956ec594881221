"""Reference of `ops.kv_store`; see there for shapes."""

from torch import Tensor

from octavo_kernels import kv_format


def kv_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_rows: Tensor) -> None:
    head_size = k.shape[-1]
    for new, cache in ((k, k_cache), (v, v_cache)):
        rows = new.reshape(-1, head_size)
        if kv_format.is_quantised(cache.dtype):
            kv_format.store(rows, cache, slot_rows)
        else:
            cache.view(-1, head_size).index_copy_(0, slot_rows, rows)
