"""What makes the caches: whether memory is measured with a first one."""

import os


class KvCacheCreator:
    def __init__(self, mapping, attn_backend="TRTLLM"):
        self._mapping = mapping
        self._attn_backend = attn_backend
        self._skip_est = os.environ.get("TRTLLM_SKIP_KV_CACHE_ESTIMATION", "0") == "1"

    def try_prepare_estimation(self):
        return not self._skip_est and self._mapping.cp_size == 1 and self._attn_backend != "VANILLA"
