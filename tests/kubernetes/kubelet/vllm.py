"""The entry point of the image vllm/vllm-openai, and its program `vllm`: the stub engine, told what vLLM would be told.

Reads vLLM's own command line and variables, and refuses to start where vLLM would. $STUB_FLAGS goes to the stub too.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys


def parse(words: list[str]) -> argparse.Namespace:
    """vLLM's flags, as far as they matter here; others are ignored."""
    if words[:1] == ["serve"]:
        words = words[1:]
    words = [re.sub(r"^--[^=]+", lambda m: m[0].replace("_", "-"), word) for word in words]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model", default="facebook/opt-125m")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", default="8000")
    parser.add_argument("--served-model-name", nargs="+", default=[])
    parser.add_argument("--api-key", nargs="+", default=[])
    parser.add_argument("--lora-modules", nargs="+", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras", default="1")
    parser.add_argument("--max-cpu-loras")
    parser.add_argument("--max-lora-rank", default="16")
    parser.add_argument("-dp", "--data-parallel-size", type=int, default=1)
    parser.add_argument("-asc", "--api-server-count", type=int)
    found, _ = parser.parse_known_args(words)
    return found


def main() -> None:
    """Become the stub engine."""
    args = parse(sys.argv[1:])
    updating = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    servers = args.api_server_count if args.api_server_count is not None else args.data_parallel_size
    if updating and servers > 1:
        sys.exit("ValueError: VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1")
    keys = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    words = ["--model", args.model_tag or args.model, "--host", args.host, "--port", args.port]
    words += ["--max-loras", args.max_loras, "--max-lora-rank", args.max_lora_rank]
    words += ["--max-cpu-loras", args.max_cpu_loras] if args.max_cpu_loras else []
    for flag, values in (
        ("--served-model-name", args.served_model_name),
        ("--api-key", keys),
        ("--lora-modules", args.lora_modules),
    ):
        words += [flag, *values] if values else []
    if not (updating and args.enable_lora):
        words.append("--no-runtime-updating")
    words += shlex.split(os.environ.get("STUB_FLAGS", ""))
    os.execv(sys.executable, [sys.executable, "-m", "sidecar.edges.stub_engine", *words])


main()
