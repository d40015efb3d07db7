"""The `banyan` command: options made from the record, one line per error, light help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import banyan
import banyan.server.serve
from banyan import cli
from banyan.options import ServeOptions, flag


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """Options that would have been served."""
    seen: list[ServeOptions] = []
    monkeypatch.setattr(banyan.server.serve, "serve", seen.append)
    return seen


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return int(caught.value.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"banyan {banyan.__version__}\n"


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help_lists_the_commands(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("serve", "inspect", "bench"))


def test_serve_help_has_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("serve", "--help") == 0
    said = capsys.readouterr().out
    for name in ServeOptions.__struct_fields__:
        assert flag(name) in said
    assert "--no-cache" in said and "--config" in said
    assert "Tokens per page, the unit of reuse. (default: 16)" in said
    assert "one of lru, lfu, slru, fifo, priority; default: lru" in said


def test_defaults(served: list[ServeOptions]) -> None:
    assert run("serve", "tiny-linear") == 0
    assert served == [ServeOptions(model="tiny-linear")]


VALUES: dict[str, tuple[tuple[str, ...], Any]] = {
    "host": (("0.0.0.0",), "0.0.0.0"),
    "port": (("0",), 0),
    "page_size": (("4",), 4),
    "tp": (("4",), 4),
    "device_bytes": (("512MiB",), 512 << 20),
    "host_bytes": (("2GiB",), 2 << 30),
    "host_ratio": (("2.5",), 2.5),
    "write_policy": (("write_back", "--host-bytes", "1GiB"), "write_back"),
    "evict_policy": (("slru",), "slru"),
    "chunk": (("64",), 64),
    "threads": (("1",), 1),
    "state_interval": (("32",), 32),
    "checkpoints": (("5",), 5),
    "max_running": (("3",), 3),
    "max_waiting": (("0",), 0),
    "verify": (("all", "--host-bytes", "1GiB"), "all"),
    "dtype": (("bfloat16",), "bfloat16"),
    "device": (("cpu",), "cpu"),
    "load_back_threshold": (("32",), 32),
    "seed": (("9",), 9),
    "order": (("longest_prefix",), "longest_prefix"),
}


@pytest.mark.parametrize("name", VALUES)
def test_each_option_sets_its_field(name: str, served: list[ServeOptions]) -> None:
    words, value = VALUES[name]
    assert run("serve", "m", flag(name), *words) == 0
    assert getattr(served[0], name) == value


def test_all_fields_are_tried() -> None:
    assert set(VALUES) | {"model", "cache"} == set(ServeOptions.__struct_fields__)


def test_cache_switch(served: list[ServeOptions]) -> None:
    assert run("serve", "m", "--no-cache") == 0
    assert run("serve", "m", "--cache") == 0
    assert [options.cache for options in served] == [False, True]


def test_config_file(served: list[ServeOptions], tmp_path: Path) -> None:
    path = tmp_path / "banyan.toml"
    path.write_text('model = "from-file"\npage-size = 8\nseed = 5\n')
    assert run("serve", "--config", str(path), "--seed", "6") == 0
    assert (served[0].model, served[0].page_size, served[0].seed) == ("from-file", 8, 6)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve",), "MODEL: no model was named. Write for example: serve tiny-linear"),
        (("serve", "m", "--page-size", "x"), "Invalid value for '--page-size'"),
        (("serve", "m", "--pagesize", "3"), "No such option: --pagesize"),
        (("serve", "m", "--chunk", "500"), "Write --chunk 496 or --chunk 512"),
        (("serve", "m", "--host-bytes", "1G"), "Write 1GiB or 1GB"),
        (("serve", "m", "--evict-policy", "lr"), "Did you mean 'lru'?"),
        (("serve", "m", "--config", "/no/such.toml"), "cannot read /no/such.toml"),
        (("serv",), "Did you mean 'serve'?"),
        (("inspect",), "Missing argument 'MODEL'"),
        (("inspect", "tiny-ful"), "cannot find 'tiny-ful': there is no preset, no folder"),
        (("inspect", "tiny-full", "--page-size", "0"), "page size 0 is below 1; use 1 or more"),
        (("inspect", "tiny-full", "--dtype", "int7"), "--dtype: 'int7' is unknown. Use auto"),
        (("bench", "no-such"), "No such command 'no-such'"),
    ],
)
def test_errors_are_one_line(
    words: tuple[str, ...],
    says: str,
    served: list[ServeOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("banyan: ") and says in said
    assert said.count("\n") == 1
    assert served == []


def test_inspect_shows_what_is_cached(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "tiny-linear") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("tiny-linear: qwen3_5_text, 8 layers, float32, pages of 16 tokens")
    assert max(map(len, lines)) <= 80 and "…" not in captured.out
    rows = [" ".join(line.split()) for line in lines]
    assert "state point 6 122,880 per state 120.0 KiB" in rows
    assert "state recurrent state 4 x 32 x 32 float32 6" in rows
    assert "full alone 1.0 KiB 1,048,576 tokens" in rows
    assert "one long prompt 1,048,448 tokens" in rows
    assert "prompts of 4,096 tokens 4.1 MiB 248 prompts" in rows


def test_inspect_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "tiny-swa", "--page-size", "32", "--dtype", "bfloat16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {
        *("model", "family", "layers", "dtype", "page_size", "components", "page_bytes", "one_gib")
    }
    assert (found["model"], found["dtype"], found["page_size"]) == ("tiny-swa", "bfloat16", 32)
    full, window = found["components"]
    kv = {"shape": [2, 32], "dtype": "bfloat16", "stride": 1, "layers": 5}
    assert window == {
        "name": "window",
        "reach": "window(64)",
        "layers": 5,
        "buffers": [{"name": "k", **kv}, {"name": "v", **kv}],
        "token_bytes": 1_280,
        "state_bytes": None,
        "record_bytes": 1_280 * 32,
        "gib_tokens": (1 << 30) // (1_280 * 32) * 32,
        "gib_states": None,
    }
    assert full["reach"] == "full"
    assert found["one_gib"].keys() == {
        *("longest_prompt", "prompt_tokens", "prompt_bytes", "prompts")
    }


def test_inspect_refuses_an_unsupported_model_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"model_type": "t5", "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("inspect", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("banyan: 't5' is an encoder-decoder model") and said.count("\n") == 1
    (tmp_path / "config.json").write_text('{"model_type": "telepathy"}')
    assert run("inspect", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "telepathy" in said and said.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from banyan.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'zmq', 'numpy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--page-size" in done.stdout


def test_bench_is_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("banyan.bench.cli")
    assert run("bench", "--help") == 0
    assert "shared-prefix" in capsys.readouterr().out


def test_module_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "banyan", "--version"], capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == f"banyan {banyan.__version__}"
