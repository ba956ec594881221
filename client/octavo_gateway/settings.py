"""What a gateway is started with. Made by `cli`, read by everything else."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TOOL_PARSERS = ("auto", "hermes", "llama3", "mistral")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`api_keys`: none lets everybody in. `aliases`: the server's name of a model by the name that clients
    use. `timeout_s` bounds a request from its arrival; None does not."""

    url: str = "grpc://localhost:8001"
    metrics_url: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0  # for a body to arrive
    max_inputs: int = 64  # prompts of one completion request, texts of one embedding request
    tool_parser: str = "auto"
    timeout_s: float | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.tool_parser not in TOOL_PARSERS:
            raise ValueError(f"no tool parser {self.tool_parser!r}; there are {', '.join(TOOL_PARSERS)}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}; allowed: 1 and more")
        if not all(self.api_keys):
            raise ValueError("an API key is empty")
