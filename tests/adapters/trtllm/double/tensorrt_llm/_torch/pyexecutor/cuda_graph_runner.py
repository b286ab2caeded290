"""Ids of the requests that pad a batch up to the size of a CUDA graph."""

CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1
