"""Serves a few requests with SGLang's engine and prints what came of them; run as a script by `test_engine`.

    python engine_run.py MODEL OPTIONS

OPTIONS are JSON: keyword arguments of SGLang's `Engine`; `scale`, by which outputs are longer; `logs`, false
for no probabilities, with which SGLang mixes no batches; and `prompts`, in the place of those that are made
here, which servers that share the work get with a room each. Prints one line `RESULT {...}`: of each
request the prompt, the output tokens, the logarithms of their probabilities, how many tokens the prefix cache
had, how many of them on the host, and with speculation in how many steps it was verified.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = (
    "The state of a sequence is",
    "The state of a model is",
    "def decode(self, tokens):\n    ",
    "Once upon a time there was",
    "for layer in layers:",
    "The state",
)


def main(model: str, options: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.engine import Engine

    scale = float(options.pop("scale", 1))
    logs = bool(options.pop("logs", True))
    given: list[list[int]] = options.pop("prompts", [])
    shared = "disaggregation_mode" in options
    engine = Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        log_level="info",
        **{"max_running_requests": 4, "max_mamba_cache_size": 24, "max_total_tokens": 1000, **options},
    )
    found: dict[str, list[Any]] = {
        name: [] for name in ("prompts", "outputs", "logs", "cached", "host", "rounds")
    }
    for turn in range(1 if given else 2):
        prompts = given or next_prompts(found, turn)
        lengths = [
            {"max_new_tokens": int(scale * (12 + 9 * (row % 6 % 4))), "temperature": 0}
            for row in range(len(prompts))
        ]
        rooms: dict[str, Any] = {}
        if shared:
            numbers = list(range(1, len(prompts) + 1))
            rooms = {"bootstrap_host": ["files"] * len(prompts), "bootstrap_room": numbers}
        results = engine.generate(input_ids=prompts, sampling_params=lengths, return_logprob=logs, **rooms)
        infos = [result["meta_info"] for result in results]
        found["prompts"] += prompts
        found["outputs"] += [result["output_ids"] for result in results]
        if logs:
            found["logs"] += [[entry[0] for entry in info["output_token_logprobs"]] for info in infos]
        found["cached"] += [info["cached_tokens"] for info in infos]
        found["host"] += [(info.get("cached_tokens_details") or {}).get("host", 0) for info in infos]
        found["rounds"] += [info.get("spec_verify_ct", 0) for info in infos]
    engine.shutdown()
    print("RESULT", json.dumps(found), flush=True)


def next_prompts(found: dict[str, list[Any]], turn: int) -> list[list[int]]:
    """Prompts; in the second turn they go on where a request ended, or in the middle of it."""
    if turn == 0:
        return [list(text.encode()) for text in PROMPTS]
    pairs = enumerate(zip(found["prompts"], found["outputs"], strict=True))
    return [[*prompt, *output[: -1 - 5 * (row % 2)], *b" and"] for row, (prompt, output) in pairs]


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
