"""Parallelism of a rank."""

from dataclasses import dataclass


@dataclass
class Mapping:
    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    enable_attention_dp: bool = False
