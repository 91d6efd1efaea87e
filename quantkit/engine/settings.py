"""What a model and a context are opened with. Plain data: it crosses to the worker process and into the records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Placement of layers on devices, passed through to llama.cpp and recorded."""

    n_gpu_layers: int = 0
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Everything about a context that can change a logit, from the protocol.

    n_ctx is the chunk length as requested: llama.cpp rounds a context up (64 becomes 256), the chunk stays what was asked.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    flash_attn: bool
    use_extra_bufts: bool
    n_threads: int
