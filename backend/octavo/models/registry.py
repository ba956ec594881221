"""From an architecture's name to its model. The worker's one way to build a model."""

import torch

from octavo.errors import ConfigError
from octavo.layers.linear import WHOLE, Placement, Shard
from octavo.models.decoder import Decoder
from octavo.models.llama import LlamaForCausalLM
from octavo.models.model_config import ModelConfig
from octavo.quant.base import Scheme, Unquantised

_MODELS = {"LlamaForCausalLM": LlamaForCausalLM}


def build_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    scheme: Scheme | None = None,
    shard: Shard = WHOLE,
    layers: range | None = None,
) -> Decoder:
    """A model with unfilled weights of `dtype` on `device`; `layers` is a pipeline stage, all by default;
    `scheme` is how linear layers store them, as loaded by default.

    Raises `ConfigError` for an architecture without code, or a size that the shard cannot divide.
    """
    try:
        model = _MODELS[model_config.architecture]
    except KeyError:
        raise ConfigError(
            f"architecture '{model_config.architecture}' is not supported; known: {', '.join(_MODELS)}"
        ) from None
    return model(model_config, Placement(scheme or Unquantised(), dtype, device, shard), layers)
