"""`make demo`: a real hybrid model answers returning documents from host memory.

Prepares Gemma 3 270M, starts a server whose device pools hold two documents, asks questions about
more than that in rounds, then asks one chat question twice and shows where its prompt came from.
Every copy is compared by SHA-256 on the way. Ends with 1 when anything is not as it should be.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.panel import Panel

from banyan.bench import target
from banyan.bench.documents import QUESTIONS, Document, DocumentQuestions, python_documents
from banyan.bench.drive import Pace
from banyan.bench.model import encode, load_config, load_tokenizer
from banyan.bench.report import Run, failed_requests, make_console, ms, percentile
from banyan.bench.run import Benchmark, finish
from banyan.bench.target import Configuration
from banyan.bench.work import Vocabulary
from banyan.engine.gemma import prepare_gemma
from banyan.errors import BanyanError

DOCUMENT_TOKENS = 1024
DEVICE_DOCUMENTS = 2
"""Documents that the device pools hold, with their questions and answers."""
CHAT_QUESTION = "Which method is called to create a new instance of a class?"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where one answer's prompt came from, and how long its first token took."""

    ttft_s: float
    prompt: int
    computed: int
    device: int
    host: int

    def line(self) -> str:
        """One line for a person."""
        return (
            f"prompt {self.prompt:,} tokens: {self.computed:,} computed, {self.device:,} from "
            f"device, {self.host:,} from host; first token after {ms(self.ttft_s)}"
        )


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model; made when absent.")] = Path(
        ".demo/gemma-3-270m"
    ),
    results: Annotated[Path, typer.Option(help="Folder for JSON and picture.")] = Path(
        "bench-results"
    ),
    documents: Annotated[int, typer.Option(help="Documents of 1,024 tokens.")] = 6,
    questions: Annotated[int, typer.Option(help="Questions about each.")] = 2,
    rounds: Annotated[int, typer.Option(help="Times that all is asked.")] = 3,
) -> None:
    """Show Banyan at work on a real model."""
    console = make_console()
    try:
        prepare_gemma(model, console.print)
        status = _show(console, str(model), results, documents, questions, rounds)
    except BanyanError as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def _show(
    console: Console, model: str, results: Path, documents: int, questions: int, rounds: int
) -> int:
    tokenizer = load_tokenizer(model)

    def ids(text: str) -> list[int]:
        return encode(tokenizer, text)

    texts = python_documents(documents, DOCUMENT_TOKENS, ids, tokenizer.decode)
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    workload = DocumentQuestions(
        tuple((*start, *document.tokens)[:DOCUMENT_TOKENS] for document in texts),
        tuple(tuple(ids(f"\n\nQuestion: {q}\nAnswer:")) for q in QUESTIONS[:questions]),
        rounds=rounds,
    )
    configuration = _configuration(model, workload)
    _introduce(console, workload, texts, configuration)
    bench = Benchmark("demo", model, workload, Vocabulary(1), Pace(concurrency=1), console)
    with target.started(bench.console, model, configuration) as url:
        run = bench.drive(url, configuration.name, configuration.arguments())
        first, again = _ask_twice(bench, url, texts[0])
        checked = _verified(target.cache_stats(url))
    failed = finish(bench.report([run]), console, results / "demo.json", results / "demo.png")
    return failed or _conclude(console, run, first, again, checked)


def _configuration(model: str, workload: DocumentQuestions) -> Configuration:
    """A server whose device pools hold `DEVICE_DOCUMENTS` documents, verifying every copy."""
    given: dict[str, Any] = {"verify": "all", "max_running": 4, "host_ratio": target.HOST_RATIO}
    options = Configuration("sizing", given).options(model)
    tokens = DEVICE_DOCUMENTS * workload.document_tokens
    given["device_bytes"] = target.device_bytes_for(tokens, load_config(model), options)
    return Configuration("device + host", given)


def _introduce(
    console: Console,
    workload: DocumentQuestions,
    texts: list[Document],
    configuration: Configuration,
) -> None:
    console.print(
        f"{len(texts)} documents of {DOCUMENT_TOKENS:,} tokens from Python's language reference "
        f"({', '.join(document.title for document in texts)}), {len(workload.questions)} "
        f"questions about each, {workload.rounds} rounds, one request at a time. The device pools "
        f"hold {DEVICE_DOCUMENTS} documents: "
        f"{configuration.given['device_bytes'] / 2**20:,.0f} MiB; "
        f"the host pools have {target.HOST_RATIO:g} times that."
    )


# ---- one chat answer, twice ----------------------------------------------------------------------


def _ask_twice(bench: Benchmark, url: str, document: Document) -> tuple[Receipt, Receipt]:
    """Ask about a document, ask about all others, and ask again."""
    content = f"{document.text}\n\n{CHAT_QUESTION}"
    name = target.served_model(url)
    bench.console.rule(f"A chat question about {document.title!r}")
    first = _chat(bench.console, url, name, content)
    with bench.console.status("Asking about the other documents, so that this one leaves device"):
        bench.quietly(url)
    bench.console.rule("The same question again")
    again = _chat(bench.console, url, name, content)
    return first, again


def _chat(console: Console, url: str, model: str, content: str) -> Receipt:
    """Stream one answer to the terminal; print and return its receipt."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 48,
        "stop": ["\n\n"],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first = time.perf_counter(), None
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for event in map(_event, response.iter_lines()):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                text = choice["delta"].get("content")
                if text:
                    first = first or time.perf_counter()
                    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    details = usage["prompt_tokens_details"]
    receipt = Receipt(
        ttft_s=(first or time.perf_counter()) - sent,
        prompt=usage["prompt_tokens"],
        computed=details["computed_tokens"],
        device=details["device_tokens"],
        host=details["host_tokens"],
    )
    console.print(Panel(receipt.line(), title="Receipt", expand=False))
    return receipt


def _event(line: str) -> dict[str, Any]:
    """The event of one line of the stream; {} of a line without one."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    event: dict[str, Any] = msgspec.json.decode(data)
    return event


# ---- what it comes to ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verified:
    """Records compared by SHA-256 over all copies, and how many differed."""

    compared: int
    mismatched: int


def _verified(stats: dict[str, Any]) -> Verified:
    copies = stats["cache"]["copies"].values()
    return Verified(*(sum(c[what] for c in copies) for what in ("verified", "mismatched")))


def _conclude(console: Console, run: Run, first: Receipt, again: Receipt, checked: Verified) -> int:
    """Say what was seen; returns 1 when something is not as it should be."""
    computed, host = _ttft_by_source(run)
    console.print(
        f"A document computed: first token after {ms(computed)}. From host: {ms(host)}"
        + (f", {host / computed:.0%} of that." if computed and host else ".")
    )
    console.print(
        f"{checked.compared:,} records compared by SHA-256, {checked.mismatched:,} differed."
    )
    expected = {
        "no document came from host in the rounds after the first": host is not None,
        "the chat question did not come from the cache the second time": again.computed
        < first.computed,
        "no record was compared": checked.compared > 0,
        "records differed after a copy": checked.mismatched == 0,
        "a request failed": failed_requests([run]) == 0,
    }
    wrong = [what for what, fine in expected.items() if not fine]
    for what in wrong:
        console.print(f"[red]Not as it should be:[/] {what}")
    return 1 if wrong else 0


def _ttft_by_source(run: Run) -> tuple[float | None, float | None]:
    """Median TTFT of prompts computed whole, and of those that came mostly from host."""
    samples = [s for result in run.rounds for s in result.samples if s.ttft_s is not None]
    whole = [s.ttft_s for s in samples if s.ttft_s and s.computed == s.prompt_tokens]
    host = [s.ttft_s for s in samples if s.ttft_s and s.host > s.prompt_tokens // 2]
    return percentile(whole, 50), percentile(host, 50)


if __name__ == "__main__":
    typer.run(main)
