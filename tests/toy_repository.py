"""Model repositories whose models need no engine, for tests of how a server is started and stopped."""

from pathlib import Path

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [1] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""

ECHO = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info(f"toy: {sys.executable}")

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            tensor = pb_utils.Tensor("text_output", np.array([f"echo: {text}".encode()], dtype=object))
            sender = request.get_response_sender()
            sender.send(
                pb_utils.InferenceResponse([tensor]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
"""


def make_toy_repository(folder: Path, model: str | None = ECHO, name: str = "toy") -> Path:
    """A repository with one model. `model` is its model.py, which is left out when None."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(CONFIG)
    if model is not None:
        (version / "model.py").write_text(model)
    return folder
