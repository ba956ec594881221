"""`/v1/embeddings`: texts or token ids to vectors of length one."""

import base64
import struct
from typing import Any

from octavo_client import AsyncClient, Options
from octavo_gateway.answers import all_of
from octavo_gateway.completions import of_input, prompts_of
from octavo_gateway.schemas import EmbeddingBody


async def embed(
    body: EmbeddingBody, client: AsyncClient, options: Options, max_inputs: int
) -> dict[str, Any]:
    """Raises `ApiError` and `OctavoError`."""
    inputs = prompts_of(body.input, "input", max_inputs)
    found = await all_of(
        [
            client.embed(given, pooling=body.pooling, dimensions=body.dimensions, **of_input(options, place))
            for place, given in enumerate(inputs)
        ]
    )
    num_tokens = sum(embedding.usage.prompt_tokens for embedding in found)
    encode = _as_base64 if body.encoding_format == "base64" else list
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": encode(embedding.vector)}
            for place, embedding in enumerate(found)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _as_base64(vector: tuple[float, ...]) -> str:
    """Of 32-bit floats, little-endian: what OpenAI's clients ask for by themselves."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
