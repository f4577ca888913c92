"""The commands of `pagestream`, and the options of `pagestream serve`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagestream.server.app import bare_app, create_app
from pagestream.server.args import (
    CACHE,
    CLIENTS,
    DEVICE,
    MODEL,
    OPERATION,
    PAGE,
    PREFIXES,
    SCHEDULING,
    SERVER,
    STREAMS,
    TESTING,
    ApiKeys,
    Origins,
    ServedNames,
    counted,
    option,
    sized,
    to_engine_args,
    to_settings,
    to_tls,
    warn_of_unknown_variables,
)
from pagestream.server.bench.command import bench
from pagestream.server.commands.config_file import ConfigFile
from pagestream.server.commands.environment import environment
from pagestream.server.commands.run_batch import run_batch
from pagestream.server.commands.talk import chat, complete
from pagestream.server.commands.top import top
from pagestream.server.journal import Journal
from pagestream.server.journal_file import READING, check_usable
from pagestream.server.logs import start_logging
from pagestream.server.metrics import Metrics
from pagestream.server.openapi import as_yaml
from pagestream.server.replay_command import replay_command
from pagestream.server.serving import bind, bind_unix, check_tls, listen, serve_until_ended, without_collections
from pagestream.server.settings import ServerSettings
from pagestream.server.simulate_command import simulate_command
from pagestream.server.tracing import check_tracing

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine

cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

# typer carries click within itself since 0.29: what its own error derives from is the one name for both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
Abort = typer.Abort

cli.add_typer(bench, name="bench")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"pagestream {version('pagestream')}")
        raise typer.Exit


@cli.callback()
def about(
    show: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """An async, streaming LLM inference server with an OpenAI-compatible API."""


@cli.command()
def serve(
    model: Annotated[str, typer.Argument(envvar="PAGESTREAM_MODEL", help="A name, a folder or a GGUF file.")] = "smollm2",
    tokenizer: Annotated[str | None, option("--tokenizer", MODEL, "Another tokenizer than the model's own.")] = None,
    tokenizer_mode: Annotated[str, option("--tokenizer-mode", MODEL, "auto or slow.")] = "auto",
    tokenizer_revision: Annotated[str | None, option("--tokenizer-revision", MODEL, "The same for the tokenizer's.")] = None,
    revision: Annotated[str | None, option("--revision", MODEL, "Branch, tag or commit of the model's repository.")] = None,
    trust_remote_code: Annotated[bool, option("--trust-remote-code", MODEL, "Run code that comes with the model.")] = False,
    chat_template: Annotated[str | None, option("--chat-template", MODEL, "A Jinja file in place of the model's own.")] = None,
    tool_call_parser: Annotated[
        str, option("--tool-call-parser", MODEL, "auto (by the chat template), hermes, llama3 or mistral.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, option("--reasoning-parser", MODEL, "auto (by the chat template), think (<think> tags) or none.")
    ] = "auto",
    dtype: Annotated[str, option("--dtype", MODEL, "auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[
        str, option("--quantization", MODEL, "auto (a GGUF file's own blocks), none (dequantised), int8 or int4 (converted at load).")
    ] = "auto",
    load_format: Annotated[str, option("--load-format", MODEL, "auto, safetensors, gguf or dummy.")] = "auto",
    max_model_len: Annotated[
        int | None, counted("--max-model-len", MODEL, "Tokens of prompt and answer together; 8K is 8,192; default: the model's.")
    ] = None,
    seed: Annotated[
        int | None, option("--seed", MODEL, "Of requests without a seed; default: fresh randomness for each.")
    ] = None,
    block_size: Annotated[int, option("--block-size", CACHE, "Tokens per block, a multiple of 16.")] = 16,
    num_kv_blocks: Annotated[
        int | None, counted("--num-kv-blocks", CACHE, "Blocks in the pool; default: what memory allows.")
    ] = None,
    kv_cache_memory: Annotated[
        float | None, sized("--kv-cache-memory", CACHE, "The pool on a CPU; default: 2, or a quarter of free memory if that is less.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, option("--kv-cache-dtype", CACHE, "auto (the model's), float32, bfloat16, float16, fp8 or int8.")
    ] = "auto",
    gpu_memory_utilization: Annotated[float, option("--gpu-memory-utilization", CACHE, "Share of a GPU's memory to use.")] = 0.9,
    swap_space: Annotated[
        float | None, sized("--swap-space", CACHE, "Host memory for blocks of preempted requests; default: 0 on a CPU, 4 on a GPU.")
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching", PREFIXES,
            "Reuse the blocks of common prompt beginnings, as is the default, or don't.", show_default=False,
        ),
    ] = True,  # fmt: skip
    max_num_seqs: Annotated[
        int | None, counted("--max-num-seqs", SCHEDULING, "Sequences per step; default: 64 on a CPU, 256 on a GPU.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, counted("--max-num-batched-tokens", SCHEDULING, "Tokens per step; default: 512 on a CPU, 8192 on a GPU.")
    ] = None,
    max_num_prefill_tokens: Annotated[
        int | None,
        counted(
            "--max-num-prefill-tokens", SCHEDULING,
            "Prompt tokens per step while at least as many decode as wait; default: by how many decode.",
        ),
    ] = None,  # fmt: skip
    max_num_queued_reqs: Annotated[
        int | None, counted("--max-num-queued-reqs", SCHEDULING, "Waiting requests; more get a 429; default: 1024.")
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None, counted("--max-num-queued-tokens", SCHEDULING, "Prompt tokens of waiting requests; more get a 429; default: no limit.")
    ] = None,
    scheduling_policy: Annotated[str, option("--scheduling-policy", SCHEDULING, "fcfs or priority.")] = "fcfs",
    preemption_mode: Annotated[str, option("--preemption-mode", SCHEDULING, "auto, swap or recompute.")] = "auto",
    device: Annotated[str, option("--device", DEVICE, "auto, cpu or cuda.")] = "auto",
    cpu_threads: Annotated[int | None, option("--cpu-threads", DEVICE, "Default: one per core.")] = None,
    kernels: Annotated[str, option("--kernels", DEVICE, "auto (the device's own) or torch, for comparison.")] = "auto",
    enforce_eager: Annotated[bool, option("--enforce-eager", DEVICE, "No CUDA graphs.")] = False,
    max_context_len_to_capture: Annotated[
        int, counted("--max-context-len-to-capture", DEVICE, "Longest context with CUDA graphs.")
    ] = 8192,
    tensor_parallel_size: Annotated[int, option("--tensor-parallel-size", DEVICE, "Only 1 is supported.")] = 1,
    disable_custom_all_reduce: Annotated[
        bool, option("--disable-custom-all-reduce", DEVICE, "Without effect on one device.")
    ] = False,
    host: Annotated[str, option("--host", SERVER, "Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, option("--port", SERVER, "0 lets the system choose.")] = 8000,
    uds: Annotated[str | None, option("--uds", SERVER, "A Unix socket to listen on in place of host and port.")] = None,
    served_model_name: ServedNames = None,
    root_path: Annotated[str, option("--root-path", SERVER, "The path that a proxy serves this server under.")] = "",
    ssl_certfile: Annotated[str | None, option("--ssl-certfile", SERVER, "Serve TLS with this certificate chain.")] = None,
    ssl_keyfile: Annotated[str | None, option("--ssl-keyfile", SERVER, "Its key, if that lies in a file of its own.")] = None,
    ssl_ca_certs: Annotated[
        str | None, option("--ssl-ca-certs", SERVER, "Ask clients for a certificate of these authorities.")
    ] = None,
    api_key: ApiKeys = None,
    api_key_file: Annotated[str | None, option("--api-key-file", CLIENTS, "A file of keys, one a line.")] = None,
    allowed_origins: Origins = None,
    max_body_size: Annotated[float, option("--max-body-size", CLIENTS, "Largest body of a request, in MiB.")] = 8.0,
    max_requests_per_key: Annotated[
        int | None, counted("--max-requests-per-key", CLIENTS, "Requests of one API key at a time; more get a 429; default: no limit.")
    ] = None,
    max_tokens_per_minute_per_key: Annotated[
        int | None, counted("--max-tokens-per-minute-per-key", CLIENTS, "Tokens of one API key, prompts and answers; default: no limit.")
    ] = None,
    slow_reader_timeout: Annotated[
        float, option("--slow-reader-timeout", CLIENTS, "Seconds after which a reader who takes nothing is cut off; 0: never.")
    ] = 120.0,
    slow_sender_timeout: Annotated[
        float, option("--slow-sender-timeout", CLIENTS, "Seconds for a request's head, and for each 32 KiB of its body; 0: for ever.")
    ] = 60.0,
    sse_keep_alive_interval: Annotated[
        float, option("--sse-keep-alive-interval", STREAMS, "Seconds between comments; 0: none.")
    ] = 15.0,
    journal: Annotated[
        Path | None, option("--journal", STREAMS, "File that keeps requests and tokens, so that a killed server's streams go on.")
    ] = None,
    stream_resume_timeout: Annotated[
        float, option("--stream-resume-timeout", STREAMS, "Seconds that a resumable stream goes on without a reader.")
    ] = 60.0,
    stream_keep: Annotated[
        float, option("--stream-keep", STREAMS, "Seconds that a finished resumable or idempotent answer can still be read.")
    ] = 300.0,
    stream_memory: Annotated[
        float | None, sized("--stream-memory", STREAMS, "Memory for answers that are kept; default: 64 MiB.")
    ] = None,
    drain_timeout: Annotated[
        float, option("--drain-timeout", OPERATION, "Seconds that running requests have after SIGTERM.")
    ] = 30.0,
    stall_timeout: Annotated[
        float, option("--stall-timeout", OPERATION, "Seconds without the end of a step after which /readyz says 503; 0: never.")
    ] = 60.0,
    log_level: Annotated[str, option("--log-level", OPERATION, "debug, info, warning or error.")] = "info",
    log_format: Annotated[str, option("--log-format", OPERATION, "plain, or json: one object a line.")] = "plain",
    otlp_endpoint: Annotated[
        str | None, option("--otlp-endpoint", OPERATION, "Send OpenTelemetry spans of each request to this collector, over HTTP.")
    ] = None,
    ui: Annotated[bool, option("--ui/--no-ui", PAGE, "Serve the page at /: playground and live view of the engine.")] = True,
    config: ConfigFile = None,
    enable_fault_injection: Annotated[
        bool, option("--enable-fault-injection", TESTING, "Obey x_fault in requests. Not for production.")
    ] = False,
) -> None:
    """Load a model and serve it.

    Each option is an environment variable too: --max-num-seqs is PAGESTREAM_MAX_NUM_SEQS.
    """
    options = dict(locals())
    start_logging(log_level, log_format)
    warn_of_unknown_variables(os.environ, options)
    engine_args, settings, tls = to_engine_args(options), to_settings(options), to_tls(options)
    noted = asdict(engine_args) | {name: options[name] for name in READING}
    check_tracing(settings.otlp_endpoint)
    if tls is not None:
        check_tls(tls)
    if journal is not None:
        check_usable(journal, noted)
    with bind(host, port, slow_reader_timeout) if uds is None else bind_unix(uds) as bound:
        metrics = Metrics(settings.name)
        with without_collections():
            from pagestream.engine import AsyncLLMEngine  # brings torch with it: seconds that no error above should wait for

            engine = AsyncLLMEngine.from_engine_args(engine_args, metrics)
        listen(bound)
        opened = None if journal is None else Journal(journal, noted)
        scheme = "http" if tls is None else "https"
        where = f"{scheme}://localhost" if uds else reachable_url(scheme, *bound.getsockname()[:2])
        print_start(engine, settings, where, uds)
        engine.populate_cache()
        code = serve_until_ended(create_app(engine, settings, metrics, opened), engine, bound, settings, tls)
    if uds is not None:
        Path(uds).unlink(missing_ok=True)
    if engine.is_dead and code:
        # A step that hangs can't be joined; a supervisor is waiting for the exit.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    raise typer.Exit(code)


@cli.command()
def openapi(
    output: Annotated[Path | None, typer.Option("--output", help="File to write; default: standard output.")] = None,
) -> None:
    """Write the API's description as YAML."""
    text = as_yaml(bare_app().openapi())
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")


cli.command("simulate")(simulate_command)
cli.command()(chat)
cli.command()(complete)
cli.command("run-batch")(run_batch)
cli.command()(top)
cli.command("env")(environment)
cli.command("replay")(replay_command)


def reachable_url(scheme: str, host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{reachable}:{port}"


def print_start(engine: AsyncLLMEngine, settings: ServerSettings, where: str, uds: str | None) -> None:
    """Address, model, capacity, and a request to try, with what else curl must be told."""
    url, options = f"{where}/v1", "" if uds is None else f" --unix-socket {uds}"
    place = url if uds is None else f"{url} on the Unix socket {uds}"
    print(f"pagestream {version('pagestream')} serves {', '.join(settings.served_model_names)} at {place}")
    print(f"  {engine.weights_summary}")
    print(f"  {engine.kv_summary}")
    if settings.ui and uds is None:  # browsers open no Unix sockets
        print(f"  see it work: {where}/")
    key = f" -H 'Authorization: Bearer {'<key>'}'" if settings.api_keys else ""
    body = f'{{"model": "{settings.name}", "prompt": "The capital of France is", "max_tokens": 16}}'
    print(f"  try: curl{options} {url}/completions -H 'Content-Type: application/json'{key} -d '{body}'", flush=True)
