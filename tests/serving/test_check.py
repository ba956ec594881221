"""`octavo check`: what it says of a repository, and that it would have loaded what it passes."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from octavo.serving import check as command
from octavo.serving.repository import ModelReport, read_repository

MakeModel = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path, weights: str) -> MakeModel:
    """`model(name, config, **engine_arguments)` adds one to a repository, which is returned."""

    def add(name: str = "llm", config: str = 'backend: "vllm"\n', **arguments: Any) -> Path:
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(config)
        own = {"model": weights, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
        (folder / "model.json").write_text(json.dumps({**own, **arguments}))
        return tmp_path

    return add


def only(repository: Path) -> ModelReport:
    (report,) = read_repository(repository)
    return report


def test_a_repository_of_the_vllm_backend_is_read_key_by_key(model: MakeModel) -> None:
    config = """
        backend: "vllm"
        instance_group [ { count: 2 kind: KIND_MODEL } ]
        parameters { key: "REPORT_CUSTOM_METRICS" value: { string_value: "yes" } }
        parameters { key: "favourite_colour" value: { string_value: "blue" } }
    """
    repository = model(config=config, disable_log_requests="true", enable_lora=False, quantization=None)
    (repository / "llm/1/multi_lora.json").write_text('{"sql": "/adapters/sql"}')
    report = only(repository)
    assert report.all_errors() == []
    assert (report.backend, report.ours, report.instances) == ("vllm", True, ["2 x KIND_MODEL"])
    assert report.notes == ["served with: octavo serve --as vllm"]
    assert report.parameters_honoured == {"REPORT_CUSTOM_METRICS": "yes"}
    assert report.parameters_ignored == {"favourite_colour": "nothing here reads it"}
    (version,) = report.versions
    assert sorted(version.honoured) == ["dtype", "max_model_len", "max_num_seqs", "model"]
    assert version.ignored == {
        "disable_log_requests": "prompts are not logged unless enable_log_requests says so",
        "enable_lora": "it asks for nothing",
        "quantization": "null stands for the default",
    }
    assert version.adapters_refused == {"sql": "/adapters/sql"}
    capacity = version.capacity
    assert capacity is not None
    assert capacity["num_layers"] == 3
    assert capacity["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert (capacity["num_blocks"], capacity["block_size"]) == (4 * 8, 16)
    assert capacity["max_concurrency"] == 4


def test_everything_that_is_refused_is_said_at_once(model: MakeModel) -> None:
    repository = model(enable_lora="true", tensor_parallel_size=2, block_size=0, blok_size=8)
    (version,) = only(repository).versions
    assert version.refused == {
        "enable_lora": "'enable_lora' is 'true': LoRA adapters are not supported by this version; "
        "allowed: false and null",
        "blok_size": "unknown engine argument 'blok_size'; did you mean 'block_size'?",
        "tensor_parallel_size": "'tensor_parallel_size' is 2; allowed: 1 in this version",
        "block_size": "'block_size' is 0; allowed: 1 to 1024",
    }
    assert sorted(version.errors) == sorted(version.refused.values())
    assert version.capacity is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('backend "vllm"', r"config.pbtxt: line 1:9 : .*Expected \":\""),
        ('backend: "vllm"\nmax_batch_size: 8', "config.pbtxt: max_batch_size is 8; allowed: 0"),
        ('backend: "vllm"\nname: "other"', "the name is 'other', but the folder's is 'llm'"),
        (
            'backend: "vllm"\nparameters { key: "REPORT_CUSTOM_METRICS" value: { string_value: "2" } }',
            "config.pbtxt: parameter 'REPORT_CUSTOM_METRICS' is '2'; allowed: true, yes, false, no",
        ),
        (
            'backend: "vllm"\ninput [ { name: "stream" data_type: TYPE_STRING dims: [1] } ]',
            r"config.pbtxt: 'stream' is STRING \[1\]; allowed: BOOL \[1\]",
        ),
        (
            'backend: "vllm"\nversion_policy: { specific: { versions: [3] } }',
            "no version folder to serve, such as 1/, with a model.json in it",
        ),
    ],
)
def test_a_configuration_that_would_not_load_is_named(model: MakeModel, config: str, words: str) -> None:
    errors = only(model(config=config)).all_errors()
    assert len(errors) == 1
    assert re.search(words, errors[0]), errors


def test_an_engine_that_would_not_load_is_named(model: MakeModel, tmp_path: Path) -> None:
    model("absent", model="facebook/opt-125m")
    model("long", max_model_len=10**6)
    model("broken")
    (tmp_path / "broken/1/model.json").write_text("{")
    model("cpu", 'backend: "octavo"\ninstance_group [ { kind: KIND_CPU } ]', device="cuda")
    errors = {report.name: report.all_errors() for report in read_repository(tmp_path)}
    assert {name: len(found) for name, found in errors.items()} == dict.fromkeys(errors, 1)
    assert "no such file or folder" in errors["absent"][0]
    assert "'max_model_len' is 1000000; the model takes at most 1024 tokens" in errors["long"][0]
    assert "model.json: 'model.json' is not valid JSON" in errors["broken"][0]
    assert "KIND_CPU, but 'device' is 'cuda'" in errors["cpu"][0]


def test_the_newest_version_is_served_unless_the_policy_says_more(model: MakeModel) -> None:
    repository = model()
    for name in ("3", "03"):
        (repository / "llm" / name).mkdir()
    (repository / "llm/3/model.json").write_text((repository / "llm/1/model.json").read_text())
    assert [version.version for version in only(repository).versions] == [3]
    (repository / "llm/config.pbtxt").write_text('backend: "vllm"\nversion_policy: { all {} }')
    assert [version.version for version in only(repository).versions] == [1, 3]
    (repository / "llm/config.pbtxt").write_text(
        'backend: "vllm"\nversion_policy: { specific: { versions: [1] } }'
    )
    assert [version.version for version in only(repository).versions] == [1]


def test_what_other_backends_serve_is_left_to_them(model: MakeModel, tmp_path: Path) -> None:
    model()
    model("bls", 'backend: "python"')
    (tmp_path / "bls/1/model.py").write_text("import triton_python_backend_utils\n")
    steps = 'step [ { model_name: "llm" }, { model_name: "gone" } ]'
    model("flow", f'platform: "ensemble"\nensemble_scheduling {{ {steps} }}')
    model("ours", 'backend: "python"')
    (tmp_path / "ours/1/model.py").write_text("from octavo.serving.tritonserver import TritonPythonModel\n")
    reports = {report.name: report for report in read_repository(tmp_path)}
    assert {name: report.ours for name, report in reports.items()} == {
        "bls": False,
        "flow": False,
        "llm": True,
        "ours": True,
    }
    assert reports["bls"].all_errors() == reports["ours"].all_errors() == []
    assert reports["flow"].all_errors() == ["config.pbtxt: a step is the model 'gone', which is not here"]


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(typer.Exit) as ended:
        command.check(Path(arguments[0]), as_json="--json" in arguments)
    captured = capsys.readouterr()
    return ended.value.exit_code, captured.out, captured.err


def test_the_text_is_made_for_reading(model: MakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    repository = model(kernel_config={})
    status, text, errors = run(str(repository), capsys=capsys)
    assert (status, errors) == (0, "")
    lines = text.splitlines()
    assert lines[0] == "llm"
    assert "  backend       vllm" in lines
    assert "    ignored     kernel_config: it is about vLLM's own kernels and compiler" in lines
    assert "    concurrency 4.0 requests of 128 tokens at once" in lines
    assert lines[-1] == "  would load    yes"
    assert max(map(len, lines)) <= 110


def test_errors_end_in_status_1_a_line_each(model: MakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    repository = model(enable_lora=True, block_size=0)
    status, text, errors = run(str(repository), capsys=capsys)
    assert status == 1
    assert "  would fail    2 errors, below" in text
    assert errors.splitlines() == [
        "error: llm: version 1: 'enable_lora' is True: LoRA adapters are not supported by this version; "
        "allowed: false and null",
        "error: llm: version 1: 'block_size' is 0; allowed: 1 to 1024",
    ]


def test_machines_get_one_object(model: MakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(str(model()), "--json", capsys=capsys)
    found = json.loads(text)
    assert (status, found["would_load"], found["errors"]) == (0, True, [])
    assert found["models"][0]["versions"][0]["capacity"]["num_blocks"] == 32


def test_host_memory_for_evicted_blocks_is_told(model: MakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    repository = model(swap_space=0.001)
    status, text, _ = run(str(repository), capsys=capsys)
    assert status == 0
    told = " ".join(text.split())
    assert "host memory 87 more blocks, for those that are evicted, limited by swap_space = 1.0 MiB" in told


def test_the_prefix_caches_directory_is_told_with_what_fits(
    model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"prefix_cache_dir": f"{tmp_path}/cache"}
    model("roomy", **stored, prefix_cache_disk_gib=1.5)
    repository = model("tight", **stored, prefix_cache_disk_gib=1e-5)
    status, text, errors = run(str(repository), capsys=capsys)
    assert status == 1
    assert f"directory {tmp_path}/cache; at most 1.50 GiB = 2,097,152 tokens" in " ".join(text.split())
    assert "tight: version 1: 'prefix_cache_disk_gib' is 1e-05; this model's KV blocks have 12,288" in errors
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("absent", "is not a folder"),
        ("empty", "holds no model"),
        ("model/llm", "is a model; name the folder"),
    ],
)
def test_what_is_no_repository_is_named(
    model: MakeModel, tmp_path: Path, place: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    model("model/llm")
    status, text, errors = run(str(tmp_path / place), capsys=capsys)
    assert (status, text) == (1, "")
    assert words in errors
    assert len(errors.splitlines()) == 1
    status, text, _ = run(str(tmp_path / place), "--json", capsys=capsys)
    assert json.loads(text)["would_load"] is False


def test_the_projects_own_repository_passes_from_the_command_line() -> None:
    repository = Path(__file__).parents[2] / "model_repository"
    ran = subprocess.run(
        [sys.executable, "-m", "octavo_client", "check", str(repository)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "LlamaForCausalLM, 30 layers, bfloat16" in ran.stdout
